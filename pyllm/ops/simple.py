"""Plain attention for every GPU from sm_80 on, and attention variants: one kernel template, ahead of time and compiled at run time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyllm.jit.variant import PLAIN, AttentionVariant, numbered
from pyllm.ops.registry import check_flag, check_positive, define
from pyllm.ops.simple_reference import _check, _reference, by_name

SIMPLE_DIMS = (64, 96, 128, 256)  # D = Dv of the ahead-of-time build


def simple_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    *,
    scale: float,
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One ragged step of attention by the plain kernel, which runs on sm_80 and later: what `paged_attention` is on GPUs before sm_90.

    `s = scale * q k^T`; `s = softcap * tanh(s / softcap)`; mask; `o = softmax(s) v`, fp32 inside, weights and o rounded once each to q's
    dtype.
    Query row j of a sequence with n rows and L keys stands at position `p = L - n + j`; it sees keys `<= p` when causal, and keys
    `> p - window`. sinks: fp32 `[H]`, one logit per head that joins the denominator. mask: int32 `[T, words]`: bit i % 32 of word i / 32 of
    a row allows key `mask_starts[b] + i` (mask_starts int32 `[B]`; None: the bits begin at the sequence's key L - n, a tree over the step's
    own tokens); keys outside the bits are not touched by it. It combines with causal and window.
    Shapes: q `[T, H, D]`; keys either contiguous, k `[S, K, D]`, v `[S, K, Dv]` with kv_starts int32 `[B + 1]`, or paged,
    `[pages, P, K, D]` (P a power of two), with page_table int32 `[B, W]` (entries past a sequence's last page are never read) and kv_lens
    int32 `[B]`. H is a multiple of K; D and Dv are multiples of 8 up to 256: 64, 96, 128, 256 (D = Dv) ahead of time, others are compiled
    by the first call (`variant_attention`). q_starts int32 `[B + 1]`. Rows at multiples of 16 bytes.
    max_q: the most rows of a sequence where the host knows it; picks the form for few rows. Results do not depend on the run.
    Returns (o `[T, H, Dv]`, lse fp32 `[T, H]`, natural log). A row without keys gives 0 and -inf (its sink, if there are sinks), a row of q
    past q_starts[B] 0 and -inf.
    Dtypes: q bf16 or fp16 (fp32 on a CPU); k and v alike, q's or float8_e4m3fn (then D and Dv are multiples of 16); k_scale, v_scale fp32
    `[1]` or `[K]`: value = stored * scale. Errors: ValueError on CPU, RuntimeError on CUDA.
    Method: flash attention (Dao et al. 2022).
    """
    check_positive("simple_attention", window=window, softcap=softcap, max_q=max_q)
    check_flag("simple_attention", "causal", causal)
    tail = (q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window or 0, softcap or 0.0, sinks, mask, mask_starts,
            k_scale, v_scale)  # fmt: skip
    if q.is_cuda and q.dim() == 3 and not (q.shape[2] == v.shape[-1] and q.shape[2] in SIMPLE_DIMS):
        return torch.ops.pyllm.variant_attention(*tail, max_q or 0, PLAIN.number, [], 0)
    return torch.ops.pyllm.simple_attention(*tail, max_q or 0)


def variant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_starts: Tensor,
    variant: AttentionVariant,
    *,
    scale: float,
    kv_starts: Tensor | None = None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    mask_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_q: int | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    first_head: int = 0,
) -> tuple[Tensor, Tensor]:
    """`simple_attention` with the scores and the mask of a variant; q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal,
    window, softcap, sinks, mask, mask_starts, k_scale, v_scale, max_q, results and dtypes as there.

    variant: a `pyllm.jit.AttentionVariant`: `s = variant.score(scale * q k^T)`, then softcap, then all masks together. On a GPU it is
    compiled by its first call for a pair (D, Dv) and a dtype, in about two seconds, and kept on disk; on a CPU its `reference` runs.
    tensors: by name, those that its params ask each call for. first_head: the number of q's first head among the heads of all ranks.
    Errors: ValueError (a variant that does not compile included) or, for what only the GPU asks for, RuntimeError.
    """
    check_positive("variant_attention", window=window, softcap=softcap, max_q=max_q)
    check_flag("variant_attention", "causal", causal)
    return torch.ops.pyllm.variant_attention(
        q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window or 0, softcap or 0.0, sinks, mask, mask_starts, k_scale,
        v_scale, max_q or 0, variant.number, variant.tensors(tensors), first_head,
    )  # fmt: skip


def _fake(op: str, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    named, numbers = by_name(args)
    _check(op, **named, **{n: numbers[n] for n in ("window", "softcap", "max_q")})
    q, v = args[0], args[2]
    return q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty(q.shape[:2], dtype=torch.float32)


def _simple_reference(*args: Any) -> tuple[Tensor, Tensor]:
    named, numbers = by_name(args)
    return _reference("simple_attention", **named, **numbers, variant=PLAIN, tensors=[], first_head=0)


def _simple_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _fake("simple_attention", args)


def _variant_reference(*args: Any) -> tuple[Tensor, Tensor]:
    *common, number, tensors, first_head = args
    named, numbers = by_name(tuple(common))
    return _reference("variant_attention", **named, **numbers, variant=numbered(number), tensors=tensors, first_head=first_head)


def _variant_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return _fake("variant_attention", args[:-3])


def _variant_cuda(*args: Any) -> tuple[Tensor, Tensor]:
    from pyllm.jit.launch import variant_attention_cuda

    *common, number, tensors, first_head = args
    named, numbers = by_name(tuple(common))
    _check("variant_attention", **named, **{n: numbers[n] for n in ("window", "softcap", "max_q")})
    return variant_attention_cuda(named, **numbers, variant=number, tensors=tensors, first_head=first_head)


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor q_starts, Tensor? kv_starts, Tensor? kv_lens, Tensor? page_table, float scale, bool causal, "
    "SymInt window, float softcap, Tensor? sinks, Tensor? mask, Tensor? mask_starts, Tensor? k_scale, Tensor? v_scale, int max_q"
)
define(
    f"simple_attention{_SCHEMA}) -> (Tensor, Tensor)",
    stem="attention/simple_attention",
    public="pyllm.ops.simple.simple_attention",
    reference=_simple_reference,
    fake=_simple_fake,
)
define(
    f"variant_attention{_SCHEMA}, int variant, Tensor[] tensors, SymInt first_head) -> (Tensor, Tensor)",
    stem="attention/variant_attention",
    public="pyllm.ops.simple.variant_attention",
    reference=_variant_reference,
    fake=_variant_fake,
    composition=_variant_cuda,
    kernel="NVRTC variant_attention",
)
