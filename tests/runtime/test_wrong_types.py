"""Every field of every public configuration, and every argument of `LLM` and its methods, given each of many wrong things: it is taken, and
then a request runs, or it is one sentence that names the owner and the field. Nothing is half taken."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from pyllm import (
    LLM,
    CudaGraphConfig,
    DraftTargetDecodingConfig,
    KvCacheConfig,
    KvCacheRetentionConfig,
    NGramDecodingConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllm.api.retention import TokenRange
from pyllm.load.tokenizer import Tokenizer
from tests.runtime.tiny import VOCAB, byte_tokenizer, tiny_spec, tiny_weights
from tests.support.wrong import complaints

CONFIGS: dict[type, dict[str, Any]] = {
    SamplingParams: {}, KvCacheConfig: {}, SchedulerConfig: {}, CudaGraphConfig: {}, NGramDecodingConfig: {}, KvCacheRetentionConfig: {},
    TokenRange: {"token_start": 0}, DraftTargetDecodingConfig: {"speculative_model": "x"},
}  # fmt: skip


FIELDS = [pytest.param(cls, f.name, id=f"{cls.__name__}-{f.name}") for cls in CONFIGS for f in dataclasses.fields(cls)]


@pytest.mark.parametrize(("owner", "field"), FIELDS)
def test_a_field(owner: type, field: str) -> None:
    failed = complaints(lambda value: owner(**CONFIGS[owner] | {field: value}), rf"^{owner.__name__}: .*\b{field}\b")
    assert not failed, failed


SMALL: dict[str, Any] = {
    "model": tiny_spec(), "weights": tiny_weights(0), "tokenizer": Tokenizer(byte_tokenizer()), "device": "cpu", "max_batch_size": 2,
    "max_num_tokens": 32, "kv_cache_config": KvCacheConfig(max_tokens=320, tokens_per_block=16), "progress": False,
}  # fmt: skip
TINY = SamplingParams(max_tokens=1)
ARGUMENTS = [name for name in inspect.signature(LLM).parameters if name != "unsupported"]


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_of_llm(argument: str) -> None:
    def use(value: Any) -> None:
        with LLM(**SMALL | {argument: value}) as llm:
            out = llm.generate([1], TINY, use_tqdm=False).outputs[0]
            assert (out.length, out.error) == (1, None)

    text = {"tokenizer": "tokenizer|cannot be opened", "weights": "weights|checkpoint has no tensor"}.get(argument, argument)
    failed = complaints(use, rf"\b({text})\b")
    assert not failed, failed


@pytest.mark.parametrize("field", ["speculative_model", "weights", "load_format", "quant"])
def test_the_second_model_is_named_where_it_is_the_wrong_one(field: str) -> None:
    draft = {"speculative_model": SMALL["model"], "weights": SMALL["weights"], "max_draft_len": 2}

    def use(value: Any) -> None:
        LLM(**SMALL, speculative_config=DraftTargetDecodingConfig(**draft | {field: value})).shutdown()

    failed = complaints(use, "^speculative_config: ")
    assert not failed, failed


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as made:
        yield made


METHODS = [(m, a) for m in ("generate", "generate_async") for a in list(inspect.signature(getattr(LLM, m)).parameters)[1:-1]]


@pytest.mark.parametrize(("method", "argument"), METHODS)
def test_an_argument_of_a_call(llm, method: str, argument: str) -> None:
    """The engine goes on, and holds nothing, whatever came."""
    prompts = [{"prompt": 3}, {"prompt": "\ud800"}, {"prompt_token_ids": "ab"}, {"prompt_token_ids": None}, [VOCAB], [VOCAB - 1], [1, "a"]]

    def use(value: Any) -> None:
        out = getattr(llm, method)(**{"inputs": [1], "sampling_params": TINY} | {argument: value})
        for one in out if isinstance(out, list) else [out]:
            assert all(c.error is None for c in one.result(30).outputs)

    failed = complaints(use, r"^(LLM|LLM\.\w+|submit|Tokenizer\.encode): ", *prompts, [10**400], [SamplingParams()], [None, None], [True])
    assert not failed, failed
    assert llm.generate([1, 2], TINY, use_tqdm=False).outputs[0].error is None
    assert llm.get_stats()["used_pages"] == 0
