"""Every field of every public configuration, and every argument of `LLM` and its methods, given each of many wrong things: it is taken, and
then a request runs, or it is one sentence that names the owner and the field. Nothing is half taken."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

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
from pyllm.api.refuse import shown
from pyllm.api.retention import TokenRange
from pyllm.load.tokenizer import Tokenizer
from tests.runtime.tiny import VOCAB, byte_tokenizer, tiny_spec, tiny_weights


class Unspeakable:
    """Neither printed, compared, hashed nor true or false."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError


BIG = [1e308, 10**400, -(10**400), 10**5000]  # the last one Python does not even print
NUMBERS = [0, 1, -1, 2, 2.5, -0.0, 64.0, math.nan, math.inf, -math.inf, *BIG, 1 + 2j, np.float32(1.5), np.int64(3)]
TEXTS = ["x", "", "64", b"x", "\ud800", ["\ud800"], ["a"], ["a", 3]]
LISTS = [[], [1], [None], [[1]], (1, 2), {1}, {}, {1: 2}, {"a": 1}, range(3)]
ARRAYS = [np.array([1, 2]), np.array(3), np.array([1.5]), np.ones((2, 2)), torch.tensor([1, 2]), torch.tensor(1), torch.ones(2, 2, 2)]
OTHERS = [torch.float32, None, True, False, np.bool_(True), object(), lambda *_: None, int]
WRONG = [*NUMBERS, *TEXTS, *LISTS, *ARRAYS, *OTHERS]


def things() -> Iterator[Any]:
    yield from WRONG
    yield from (Unspeakable(), iter([1]), (i for i in "ab"))  # new ones each time: they can be read once


def complaint(call: Callable[[], Any], text: str) -> str | None:
    """What is wrong with how the call fails, if it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
    except (TypeError, ValueError, MemoryError) as error:
        return None if re.search(text, str(error)) else f"says {type(error).__name__}: {error}"
    except BaseException as error:
        return f"raises {type(error).__name__}: {error}"
    return None


def told(value: Any) -> str:
    return f"{type(value).__name__} {shown(value)}"


CONFIGS: dict[type, dict[str, Any]] = {
    SamplingParams: {}, KvCacheConfig: {}, SchedulerConfig: {}, CudaGraphConfig: {}, NGramDecodingConfig: {}, KvCacheRetentionConfig: {},
    TokenRange: {"token_start": 0}, DraftTargetDecodingConfig: {"speculative_model": "x"},
}  # fmt: skip


FIELDS = [pytest.param(cls, f.name, id=f"{cls.__name__}-{f.name}") for cls in CONFIGS for f in dataclasses.fields(cls)]


@pytest.mark.parametrize(("owner", "field"), FIELDS)
def test_a_field(owner: type, field: str) -> None:
    failed = []
    for value in things():
        wrong = complaint(lambda v=value: owner(**CONFIGS[owner] | {field: v}), rf"^{owner.__name__}: .*\b{field}\b")
        failed += [f"{told(value)}: {wrong}"] if wrong else []
    assert not failed, "\n".join(failed)


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

    failed = []
    for value in things():
        text = {"tokenizer": "tokenizer|cannot be opened", "weights": "weights|checkpoint has no tensor"}.get(argument, argument)
        wrong = complaint(lambda v=value: use(v), rf"\b({text})\b")
        failed += [f"{told(value)}: {wrong}"] if wrong else []
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("field", ["speculative_model", "weights", "load_format", "quant"])
def test_the_second_model_is_named_where_it_is_the_wrong_one(field: str) -> None:
    draft = {"speculative_model": SMALL["model"], "weights": SMALL["weights"], "max_draft_len": 2}
    failed = []
    for value in things():
        config = DraftTargetDecodingConfig(**draft | {field: value})
        wrong = complaint(lambda c=config: LLM(**SMALL, speculative_config=c).shutdown(), "^speculative_config: ")
        failed += [f"{told(value)}: {wrong}"] if wrong else []
    assert not failed, "\n".join(failed)


@pytest.fixture(scope="module")
def llm():
    with LLM(**SMALL) as made:
        yield made


METHODS = [(m, a) for m in ("generate", "generate_async") for a in list(inspect.signature(getattr(LLM, m)).parameters)[1:-1]]


@pytest.mark.parametrize(("method", "argument"), METHODS)
def test_an_argument_of_a_call(llm, method: str, argument: str) -> None:
    """The engine goes on, and holds nothing, whatever came."""
    prompts = [{"prompt": 3}, {"prompt": "\ud800"}, {"prompt_token_ids": "ab"}, {"prompt_token_ids": None}, [VOCAB], [VOCAB - 1], [1, "a"]]
    failed = []
    for value in (*things(), *prompts, [10**400], [SamplingParams()], [None, None], [True]):

        def use(v: Any = value) -> None:
            out = getattr(llm, method)(**{"inputs": [1], "sampling_params": TINY} | {argument: v})
            for one in out if isinstance(out, list) else [out]:
                assert all(c.error is None for c in one.result(30).outputs)

        wrong = complaint(use, r"^(LLM|submit|Tokenizer\.encode): |^LLM\.\w+: ")
        failed += [f"{told(value)}: {wrong}"] if wrong else []
    assert not failed, "\n".join(failed)
    assert llm.generate([1, 2], TINY, use_tqdm=False).outputs[0].error is None
    assert llm.get_stats()["used_pages"] == 0
