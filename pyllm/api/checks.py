"""What the engine asks of its arguments: one sentence for each that is wrong, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from pyllm.api.params import id_tuple
from pyllm.api.refuse import shown
from pyllm.ops.attention import DECODE_DIMS, PREFILL_FP8_DIMS
from pyllm.ops.sampling import LOGIT_TYPES, MAX_VOCAB
from pyllm.plan.pages import ONE_BYTE, SlotSizes
from pyllm.runtime.schedule import LOGIT_ROWS

# Share of the free memory that the KV pool takes when no size is given: the rest is for activations, and a CPU's memory is everybody's.
POOL_SHARE = {"cuda": 0.8, "cpu": 0.25}


class DecoderSpec(Protocol):
    """What the engine reads from a declaration (`pyllm.layers.Decoder`)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    def kv_slots(self) -> Mapping[int, SlotSizes]: ...


def check_sizes(sizes: Mapping[str, int], optional: Mapping[str, int | None], spec: DecoderSpec) -> None:
    for name, value in {**sizes, **{n: v for n, v in optional.items() if v is not None}}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"Engine: {name} is {shown(value)}, expected an integer, at least 1")
    if optional["pages"] is not None and optional["max_tokens"] is not None:
        given = f"pages={optional['pages']} and max_tokens={optional['max_tokens']}"
        raise ValueError(f"Engine: {given} both size the KV pool, expected one of them")
    length, positions = optional["max_length"], spec.max_positions
    if length is not None and length > positions:
        raise ValueError(f"Engine: max_length (max_seq_len of LLM) is {length}, expected at most the model's context of {positions}")
    if spec.vocab_size > MAX_VOCAB:
        raise ValueError(f"Engine: the model has {spec.vocab_size} tokens, expected at most {MAX_VOCAB}, among which one can be sampled")


def check_types(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, weights: object, eos_ids: Iterable[int]
) -> tuple[torch.dtype, frozenset[int]]:
    """kv_dtype and eos_ids."""
    if device.type not in POOL_SHARE:
        raise ValueError(f"Engine: device is {device}, expected cpu or cuda")
    if kv_dtype not in (dtype, *ONE_BYTE):
        raise ValueError(f"Engine: kv_dtype is {kv_dtype}, expected {dtype} like dtype, torch.float8_e4m3fn or torch.int8")
    if not isinstance(weights, Mapping) and not callable(weights):
        raise ValueError(f"Engine: weights is {shown(weights)}, expected a mapping of tensors or a bound module")
    return kv_dtype, frozenset(id_tuple("Engine: eos_ids", eos_ids))


def check_int8(spec: DecoderSpec, dtype: torch.dtype, cuda: bool) -> None:
    """ValueError where no kernel reads an int8 cache."""
    dims = sorted({s.head_dim for s in spec.kv_slots().values()})
    if cuda and (dtype == torch.float32 or not set(dims) <= set(DECODE_DIMS)):
        raise ValueError(f"Engine: an int8 cache with {dtype} and head dims {dims}, expected bfloat16 or float16 and some of {DECODE_DIMS}")


def grid_of(spec: DecoderSpec, module: object, cuda: bool, kv_dtype: torch.dtype, page_size: int, chunk: int, reserve: bool) -> int:
    """Tokens of a prompt that the deterministic mode computes in one piece. ValueError for what it does not go with."""
    if not reserve:
        raise ValueError(
            "Engine: deterministic=True with reserve=False (MAX_UTILIZATION), which computes some requests anew, in other steps"
        )
    if chunk < page_size:
        raise ValueError(f"Engine: chunk is {chunk}, expected at least a page of {page_size} tokens with deterministic=True")
    if cuda and not getattr(module, "invariant", False):
        raise ValueError("Engine: deterministic=True on CUDA with a module that was bound without invariant=True")
    dims = {s.head_dim for s in spec.kv_slots().values()}
    if cuda and kv_dtype == torch.int8:
        raise ValueError("Engine: deterministic=True with an int8 cache on CUDA, expected one of them; an fp8 cache goes with it")
    if cuda and kv_dtype == torch.float8_e4m3fn and not dims <= set(PREFILL_FP8_DIMS):
        raise ValueError(f"Engine: deterministic=True with an fp8 cache of head dims {sorted(dims)}, expected some of {PREFILL_FP8_DIMS}")
    return min(chunk, LOGIT_ROWS) // page_size * page_size


def check_draft(spec: DecoderSpec, draft: DecoderSpec, max_length: int, draft_len: int) -> None:
    """ValueError for a second model that cannot guess for the first."""
    if draft.vocab_size != spec.vocab_size:
        raise ValueError(
            f"Engine: the draft model has {draft.vocab_size} tokens, expected the {spec.vocab_size} of the model it guesses for"
        )
    if draft.max_positions < max_length:
        raise ValueError(f"Engine: the draft model has {draft.max_positions} positions, expected max_length={max_length} or more")
    if draft_len < 1:
        raise ValueError(f"Engine: draft_len is {draft_len}, expected at least 1 with a draft_model")


def check_fits(tokens: int, need: int, total: int, page_size: int) -> None:
    """ValueError for a request of so many tokens, which need more pages than the pool has in all."""
    if need > total:
        pool = f"the pool has {total * page_size} ({total} pages)"
        raise ValueError(f"submit: prompt and max_tokens need {tokens} tokens of KV cache ({need} pages), {pool}")


def check_logits(logits: Any, rows: int, vocab: int) -> torch.Tensor:
    """RuntimeError for what a caller's own module gives in place of logits: other columns would be other tokens."""
    if not isinstance(logits, torch.Tensor) or logits.shape != (rows, vocab) or logits.dtype not in LOGIT_TYPES:
        came = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, torch.Tensor) else shown(logits)
        raise RuntimeError(f"Engine: the model gave {came}, expected logits [{rows}, {vocab}] in bfloat16, float16 or float32")
    return logits


def check_captured(name: str, sizes: Sequence[int], most: int) -> list[int]:
    for n in sizes:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= most:
            raise ValueError(f"Engine: {name} holds {shown(n)}, expected sizes from 1 to {most}")
    return list(sizes)


def told(error: BaseException) -> str:
    """Of a caller's own code, whose errors may be of any kind: some cannot even say what they are."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__
