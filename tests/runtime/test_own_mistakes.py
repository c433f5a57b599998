"""What one request brings along, parameters and code, may fail that request; the others, the cache and the engine live on."""

from __future__ import annotations

import asyncio
import math
import threading

import numpy as np
import pytest
import torch

from pyllm import SamplingParams
from pyllm.load.tokenizer import Tokenizer
from pyllm.runtime.loop import EngineLoop
from pyllm.runtime.request import Request
from tests.runtime.fake import NAN_TOKEN, VOCAB, FakeModel, FakeSpec, expected
from tests.runtime.test_engine import DEVICES, assert_idle, make
from tests.runtime.test_llm import speaking
from tests.runtime.tiny import byte_tokenizer

ALL = range(VOCAB)
OWN = {
    "biases": {"logit_bias": dict.fromkeys(ALL, -math.inf)},
    "infinities": {"logit_bias": ((0, math.inf), (0, -math.inf))},
    "bad tokens": {"bad_token_ids": tuple(ALL)},
    "ends before min_tokens": {"stop_token_ids": tuple(ALL), "min_tokens": 3},
    "NaN": {"logits_processor": lambda ids, x: x * math.nan},
    "nothing finite": {"logits_processor": lambda ids, x: torch.full_like(x, -math.inf)},
    "raises": {"logits_processor": lambda ids, x: 1 / 0},
    "sampled": {"logit_bias": dict.fromkeys(ALL, -math.inf), "temperature": 0.7},
}
LONG, OTHER = list(range(1, 41)), list(range(10, 50))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mistake", OWN)
def test_a_request_that_spoils_its_own_logits_costs_others_nothing(mistake: str, overlap: bool, device: str) -> None:
    """Neither those that run beside it nor the cached pages, whoever put them there: its prompt's own among them."""
    engine = make(overlap=overlap, device=device)
    engine.submit(LONG, SamplingParams(max_tokens=3))
    engine.run()
    cached = engine.pool.cached
    assert cached == 2
    beside = engine.submit(OTHER, SamplingParams(max_tokens=30))
    bad = [engine.submit(p, SamplingParams(max_tokens=8, logprobs=1, **OWN[mistake])) for p in ([3, 1], LONG, list(range(5, 40)))]
    engine.run()
    for request in bad:
        assert (request.finish_reason, request.token_ids, request.logprobs) == ("error", [], [])
        assert ("a logits_processor failed: ZeroDivisionError" if mistake == "raises" else "the request's own changes") in request.error
    assert beside.token_ids == expected(OTHER, 30, 120)
    assert engine.pool.cached >= cached + 2 + 2
    again = [engine.submit(p, SamplingParams(max_tokens=3)) for p in (LONG, OTHER, list(range(5, 40)))]
    engine.run()
    assert [r.cached_tokens for r in again] == [32, 32, 32]
    assert [r.token_ids for r in again] == [expected(r.prompt_token_ids, 3, 120) for r in again]
    assert_idle(engine)


@pytest.mark.parametrize(
    "own", [{}, {"repetition_penalty": 1.5}, {"logits_processor": lambda ids, x: x}, {"logits_processor": lambda ids, x: 1 / 0}]
)
def test_a_model_that_gives_no_numbers_empties_the_cache_whatever_a_request_asks_for(own: dict) -> None:
    """Its pages may hold what made them so: a deployment whose requests all have penalties must come out of it too."""
    engine = make()
    engine.submit(LONG, SamplingParams(max_tokens=3))
    engine.run()
    assert engine.pool.cached == 2
    bad = engine.submit([4, NAN_TOKEN], SamplingParams(max_tokens=8, **own))
    engine.run()
    assert bad.finish_reason == "error" and "own changes" not in bad.error
    assert engine.pool.cached == 0
    assert_idle(engine)


class Silent(BaseException):
    """An error that cannot even say what it is."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


KINDS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, StopIteration, MemoryError, Silent]


def raising(kind: type[BaseException]):
    def run(*_):
        raise kind

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_may_raise_anything(kind: type[BaseException]) -> None:
    with speaking("ok") as llm:
        beside = llm.generate_async("1234", SamplingParams(max_tokens=300))
        out = llm.generate("1234", SamplingParams(logits_processor=raising(kind))).outputs[0]
        assert (out.finish_reason, out.error.partition(":")[0]) == ("error", "a logits_processor failed")
        assert kind.__name__ in out.error
        assert beside.result(30).outputs[0].text == "ok"
        assert llm.generate("1234").outputs[0].text == "ok"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_may_raise_anything(kind: type[BaseException]) -> None:
    model = FakeModel()
    engine = make(model)
    loop = EngineLoop(engine, 60.0)
    good, runner = engine._runner._module, engine._runner
    runner._module = raising(kind)
    first = engine.prepare([1, 2], SamplingParams(max_tokens=4))
    loop.submit([first])
    wait_for(first)
    assert (first.finish_reason, first.error.partition(":")[0]) == ("error", "a step of the engine failed")
    runner._module = good
    second = engine.prepare([1, 2], SamplingParams(max_tokens=4))
    loop.submit([second])
    wait_for(second)
    assert (second.token_ids, loop.closed) == (expected([1, 2], 4, 120), None)
    loop.shutdown()
    assert_idle(engine)


def wait_for(request: Request) -> None:
    ended = threading.Event()
    request.listener = lambda _: ended.set()
    assert request.finished or ended.wait(30)


class Panics(Tokenizer):
    """Native code that panics raises what is no Exception, when it sees one token."""

    def stream(self, skip_special_tokens: bool = True):
        decoder = super().stream(skip_special_tokens)
        push = decoder.push
        decoder.push = lambda token: push(token) if token != ord("!") else raising(Silent)()
        return decoder


def test_a_tokenizer_that_fails_on_a_token_fails_that_request_alone() -> None:
    with speaking("ok! and more") as llm:
        plain = llm.tokenizer
        beside = llm.generate_async("1234", SamplingParams(max_tokens=300, stop="nowhere"))
        llm.tokenizer = Panics(byte_tokenizer())
        out = llm.generate("1234", SamplingParams(max_tokens=300, stop="nowhere", detokenize=True))
        assert (out.outputs[0].finish_reason, out.outputs[0].error) == ("error", "the tokenizer failed on token 33: Silent")
        assert (out.outputs[0].text, out.outputs[0].length) == ("ok", 3)
        llm.tokenizer = plain
        assert beside.result(30).outputs[0].text == "ok! and more"
        assert llm.generate("1234", SamplingParams(max_tokens=300, stop="a")).outputs[0].text == "ok! "
        assert llm.get_stats()["used_pages"] == 0


OUTPUTS = {
    "nothing": (lambda rows: None, "None"),
    "an array": (lambda rows: np.zeros((rows, VOCAB)), "array"),
    "three dimensions": (lambda rows: torch.zeros(1, rows, VOCAB), rf"torch.float32 \[1, 1, {VOCAB}\]"),
    "one dimension": (lambda rows: torch.zeros(VOCAB), rf"torch.float32 \[{VOCAB}\]"),
    "more columns": (lambda rows: torch.zeros(rows, VOCAB + 8), rf"torch.float32 \[1, {VOCAB + 8}\]"),
    "fewer columns": (lambda rows: torch.zeros(rows, VOCAB - 1), rf"torch.float32 \[1, {VOCAB - 1}\]"),
    "more rows": (lambda rows: torch.zeros(rows + 1, VOCAB), rf"torch.float32 \[2, {VOCAB}\]"),
    "integers": (lambda rows: torch.zeros(rows, VOCAB, dtype=torch.int64), rf"torch.int64 \[1, {VOCAB}\]"),
    "fp64": (lambda rows: torch.zeros(rows, VOCAB, dtype=torch.float64), rf"torch.float64 \[1, {VOCAB}\]"),
}


@pytest.mark.parametrize(
    "params", [{}, {"repetition_penalty": 2.0}, {"temperature": 1.0, "logprobs": 2}], ids=["greedy", "shaped", "sampled"]
)
@pytest.mark.parametrize("case", OUTPUTS)
def test_what_a_callers_module_gives_is_looked_at(case: str, params: dict) -> None:
    """Other columns would be other tokens, without a word."""
    give, came = OUTPUTS[case]
    engine = make(lambda b: give(len(b.logit_rows) if b.logit_rows is not None else len(b.kv_lens)))
    engine.submit([1, 2, 3], SamplingParams(max_tokens=3, **params))
    with pytest.raises(RuntimeError, match=rf"Engine: the model gave {came}.*, expected logits \[1, {VOCAB}\] in bfloat16, float16 or"):
        engine.run()


def test_a_vocabulary_that_cannot_be_sampled_from_is_found_at_the_start() -> None:
    with pytest.raises(ValueError, match="Engine: the model has 2097152 tokens, expected at most 1048576"):
        make(spec=FakeSpec(vocab_size=1 << 21))


@pytest.mark.parametrize("timeout", ["x", math.nan, [1], torch.ones(2)])
def test_a_time_to_wait_is_a_number(timeout) -> None:
    with speaking("ok") as llm:
        handle = llm.generate_async("1234")
        with pytest.raises(ValueError, match="RequestOutput.result: timeout is .*, expected None or seconds"):
            handle.result(timeout)
        assert [handle.result(seconds).outputs[0].text for seconds in (1e300, math.inf, None)] == ["ok"] * 3


def test_what_a_handle_shows_is_a_copy() -> None:
    with speaking("x" * 50) as llm:
        handle = llm.generate_async("1234", SamplingParams(max_tokens=300), streaming=True)
        for look in handle:
            look.prompt_token_ids.append(9)
        assert handle.outputs[0].text == "x" * 50
        assert llm.generate("1234", SamplingParams(max_tokens=300)).outputs[0].text == "x" * 50
