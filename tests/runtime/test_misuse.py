"""Wrong use is one sentence at the call, and never costs others their requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pyllm import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams
from pyllm.api.text import TextOutput
from pyllm.cli import app
from pyllm.layers import Fp8
from pyllm.load.tokenizer import Tokenizer
from tests.runtime.test_llm import speaking
from tests.runtime.tiny import VOCAB, byte_tokenizer, save_tiny, tiny_spec

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize(
    ("inputs", "text"),
    [(None, "expected a prompt"), (5, "expected a prompt"), (b"abc", "expected a prompt"), ({1, 2}, "expected a prompt"),
     ([1, "a"], "a prompt is 1"), ([None], "a prompt is None"), ([1.0], "a prompt is 1.0"), ([b"a"], "a prompt is b'a'"),
     ({"prompt": [1]}, "prompt is .*expected text"), ({"prompt_token_ids": "a"}, "expected token ids"),
     ({"prompt": None}, "prompt is None"), (torch.tensor(3), r"inputs is tensor\(3\), expected a prompt"),
     (np.array(3), "inputs is array"), ({}, "an input has no fields, expected prompt or")],
)  # fmt: skip
def test_wrong_prompts(inputs, text) -> None:
    with speaking("ok") as llm, pytest.raises(ValueError, match=text):
        llm.generate(inputs)


def test_arrays_and_tensors_are_token_ids() -> None:
    with speaking("ok") as llm:
        for one in (np.array([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4]), list(np.array([1, 2, 3, 4])), range(1, 5)):
            out = llm.generate(one)
            assert (out.prompt_token_ids, out.outputs[0].text) == ([1, 2, 3, 4], "ok")
        assert [o.outputs[0].text for o in llm.generate(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))] == ["ok", "ok"]


@pytest.mark.parametrize(
    "wrong", [{"priority": "high"}, {"priority": 1.5}, {"priority": None}, {"cache_salt": 5}, {"cache_salt": "\ud800"}]
)
def test_a_wrong_priority_or_salt_does_not_reach_the_engine(wrong) -> None:
    with speaking("ok") as llm:
        with pytest.raises(ValueError, match=r"submit: (priority|the cache salt) is "):
            llm.generate("1234", **wrong)
        assert llm.generate("1234", cache_salt="é").outputs[0].text == "ok"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda f: LLM(f, max_num_tokens=0), "max_num_tokens is 0"),
        (lambda f: LLM(f, watchdog_timeout="x"), "watchdog_timeout is 'x'"),
        (lambda f: LLM(f, deterministic="no"), "LLM: deterministic is 'no', expected a bool"),
        (lambda f: LLM(f, disable_overlap_scheduler=0), "LLM: disable_overlap_scheduler is 0, expected a bool"),
        (lambda f: LLM(f, skip_tokenizer_init="no"), "LLM: skip_tokenizer_init is 'no', expected a bool"),
        (lambda f: LLM(f, progress="no"), "LLM: progress is 'no', expected a bool"),
        (lambda f: LLM(f, device=1.5), "device is 1.5, expected cpu, cuda or cuda:N"),
        (lambda f: LLM(tiny_spec().subs[0], load_format="dummy"), "model is a Sub, expected a Decoder, a directory"),
        (lambda f: LLM(f, quant=None), "quant is None, expected 'fp8', or pairs"),
        (lambda f: LLM(f, quant={"*": Fp8()}), r"quant is {'\*': Fp8\(.*, expected 'fp8', or pairs"),
        (lambda f: LLM(f, quant=[("*", Fp8)]), r"quant gives '\*' the format <class"),
        (lambda f: LLM(f, tokenizer=f, skip_tokenizer_init=True), "beside skip_tokenizer_init"),
        (lambda f: SamplingParams(logits_processor=3), "logits_processor is 3, expected a function"),
        (lambda f: SamplingParams(logit_bias=3), "logit_bias is 3, expected {token id: number}"),
        (lambda f: KvCacheConfig(free_gpu_memory_fraction=True), "free_gpu_memory_fraction is True"),
        (lambda f: CudaGraphConfig(batch_sizes=3), "batch_sizes is 3"),
        (
            lambda f: KvCacheConfig(enable_block_reuse=False, host_cache_size=1 << 20),
            "host_cache_size is 1048576, expected 0 with enable_block",
        ),
        (
            lambda f: KvCacheConfig(enable_block_reuse=False, event_buffer_max_size=9),
            "event_buffer_max_size is 9, expected 0 with enable_b",
        ),
    ],
)
def test_wrong_arguments(folder, call, text) -> None:
    with pytest.raises(ValueError, match=text):
        call(folder)


@pytest.mark.parametrize("params", ["greedy", {"max_tokens": 3}, 3])
def test_parameters_that_are_none(params) -> None:
    with speaking("ok") as llm, pytest.raises(ValueError, match="LLM: sampling_params is .*, expected a SamplingParams"):
        llm.generate("1234", params)


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)},
        {"bad_token_ids": tuple(range(VOCAB))},
        {"logits_processor": lambda ids, x: x * math.nan},
    ],
    ids=["biases", "bad tokens", "processor"],
)
def test_logits_that_a_request_has_spoiled_are_not_laid_to_the_model(params) -> None:
    with speaking("ok") as llm:
        out = llm.generate("1234", SamplingParams(**params)).outputs[0]
        assert (out.finish_reason, "once the request's own changes are applied, hold no" in out.error) == (
            "error",
            True,
        )
        assert llm.generate("1234").outputs[0].text == "ok"


def test_a_stop_string_before_min_tokens_stays_whatever_others_there_are() -> None:
    for stops in (["a"], ["a", "a longer one"]):
        out = TextOutput(Tokenizer(byte_tokenizer()), stops)
        assert [out.find_stop(list(b"xay"[:n]), 3) for n in (1, 2, 3)] == [None] * 3
        assert (out.find_stop(list(b"xaya"), 3), out.text) == ("a", "xay")


def test_shutdown_during_a_step_that_hangs_comes_back() -> None:
    llm, release = speaking("x", watchdog=0.5), threading.Event()
    begun = threading.Event()
    llm._engine._runner._module = lambda b: (begun.set(), release.wait())
    handle = llm.generate_async("1234")
    assert begun.wait(10)
    stop = threading.Thread(target=llm.shutdown, daemon=True)
    stop.start()
    assert handle.result(timeout=20).outputs[0].error == "a step took longer than watchdog_timeout=0.5 seconds"
    stop.join(20)
    assert not stop.is_alive()
    release.set()


def test_several_threads_may_wait_for_one_request() -> None:
    with speaking("x" * 200) as llm:
        handle = llm.generate_async("1234", SamplingParams(max_tokens=300))
        threads = [threading.Thread(target=handle.result) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(30)
        assert handle.result().outputs[0].text == "x" * 200


def test_a_loop_that_closes_while_a_request_runs_costs_nobody_anything() -> None:
    with speaking("x" * 200) as llm:
        handle = llm.generate_async("1234", SamplingParams(max_tokens=300))

        async def gives_up() -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(handle.aresult(), 0.001)

        asyncio.run(gives_up())
        assert handle.result(30).outputs[0].text == "x" * 200
        assert llm.generate("1234", SamplingParams(max_tokens=300)).outputs[0].text == "x" * 200


def test_the_token_that_ends_is_no_text_even_before_the_end_is_said() -> None:
    with speaking([72, 105]) as llm:
        handle = llm.generate_async("1234", SamplingParams(max_tokens=9, stop_token_ids=[105]))
        request = handle._requests[0]
        handle.result(30)
        request.finish_reason = request.stop_reason = None  # as the engine's thread leaves it for a moment
        assert request.text_token_ids == [72]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("bench throughput M --sweep 1,x", "--sweep is '1,x', expected concurrencies"),
        ("bench throughput M --sweep 0", "--sweep is '0'"),
        ("bench throughput M --sweep 1 --concurrency 2", "both given"),
        ("bench throughput M --concurrency 0", "--concurrency is 0"),
        ("bench latency M --concurrency -2", "--concurrency is -2"),
        ("bench throughput M --num-requests 0", "--num-requests is 0"),
        ("bench throughput M --input-len -1", "--input-len is -1"),
        ("bench throughput M --dataset D --input-len 8", "--input-len and --dataset, whose lines say it, are both given"),
        ("bench latency M --dataset D --output-len 8", "--output-len and --dataset, whose lines say it"),
        ("bench latency M --draft-len 3", "--draft-len without --draft"),
        ("bench throughput M --draft ngram --draft-len 0", "max_draft_len is 0, expected an integer from 1 to 7"),
        ("bench throughput M --warmup -1", "--warmup is -1"),
        ("bench throughput M --seed -1", "--seed is -1"),
        ("bench throughput M --max-num-tokens 0", "--max-num-tokens is 0"),
        ("bench throughput M --max-seq-len 0", "--max-seq-len is 0"),
        ("bench throughput M --report-json /no/such/place/x.json", "--report-json is '/no/such/place/x.json'"),
        ("plan llama-3.1-8b --memory 0", "--memory is 0.0"),
        ("plan llama-3.1-8b --memory inf", "--memory is inf"),
        ("plan llama-3.1-8b --memory nan", "--memory is nan"),
        ("plan llama-3.1-8b --max-batch-size 0", "--max-batch-size is 0"),
        ("plan llama-3.1-8b --free-gpu-memory-fraction 5", "--free-gpu-memory-fraction is 5.0"),
    ],
)
def test_wrong_options(folder, args, text) -> None:
    out = CliRunner().invoke(app, [str(folder) if a == "M" else a for a in args.split()])
    assert (out.exit_code, text in out.stderr, out.stderr.count("\n")) == (2, True, 1), out.stderr


def test_generate_with_a_closed_stdout(folder) -> None:
    """Nobody reads: no text, and no traceback."""
    command = [sys.executable, "-m", "pyllm", "generate", str(folder), "x", "--device", "cpu", "--max-tokens", "2", "--no-stats"]
    out = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True, timeout=120, check=False)
    assert (out.returncode, out.stderr) == (0, "")


def test_datasets(tmp_path) -> None:
    from pyllm.measure.bench import read_dataset

    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a\u2028b", "output_tokens": 3}\n', encoding="utf-8")
    assert [i.prompt for i in read_dataset(path, None)] == ["a\u2028b"]
    for line in (
        b'{"prompt": "caf\xe9", "output_tokens": 3}',
        b'{"prompt": "a", "output_tokens": 0}',
        b'{"input_ids": [], "output_tokens": 1}',
    ):
        path.write_bytes(line)
        with pytest.raises(ValueError, match=r"d\.jsonl, line 1: "):
            read_dataset(path, None)
