"""Prefill attention: the ragged Hopper kernel of csrc/attention over contiguous or paged keys, 16-bit or FP8."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.jit.variant import PLAIN
from pyllm.ops.attention import PREFILL_DIMS, PREFILL_FP8_DIMS
from pyllm.ops.registry import check, check_flag, check_positive, define
from pyllm.ops.simple import _check, _reference

_OP, _FP8 = "prefill_attention", torch.float8_e4m3fn


def prefill_attention(
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
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of many query rows per sequence, ragged, on Hopper's tensor cores.

    `s = scale * q k^T`; `s = softcap * tanh(s / softcap)`; mask; `o = softmax(s) v`, fp32 inside, weights and o rounded once each to q's
    dtype (FP8: weights to e4m3, o to bf16).
    Query row j of a sequence with n rows and L keys stands at position `p = L - n + j`; it sees keys `<= p` when causal, and keys
    `> p - window`. sinks: fp32 `[H]`, one logit per head that joins the denominator. mask: int32 `[T, words]`: bit i % 32 of word i / 32 of
    a row allows key `mask_starts[b] + i` (mask_starts int32 `[B]`; None: the bits begin at the sequence's key L - n, a tree over the step's
    own tokens); keys outside the bits are not touched by it. It combines with causal and window.
    Shapes: q `[T, H, D]`; keys either contiguous, k `[S, K, D]`, v `[S, K, Dv]` with kv_starts int32 `[B + 1]`, or paged,
    `[pages, P, K, D]` (P a power of two from 16) with page_table int32 `[B, W]` (entries past a sequence's last page are never read) and
    kv_lens int32 `[B]`. H is a multiple of K; (D, Dv) is (64, 64), (96, 96), (128, 128), (192, 192), (192, 128) or (256, 256), FP8: (64,
    64), (128, 128) or (256, 256). q_starts int32 `[B + 1]`. Rows at multiples of 16 bytes, any stride of tokens, heads and pages.
    Returns (o `[T, H, Dv]`, lse fp32 `[T, H]`, natural log). A row without keys gives 0 and -inf (its sink, if there are sinks), a row of q
    past q_starts[B] 0 and -inf.
    Dtypes: q, k, v bf16 or fp16 alike (fp32 on a CPU), or all e4m3, with value = stored * scale: q_scale fp32 `[1]` or `[T, H]` (a row
    each), k_scale and v_scale fp32 `[1]`, `[K]` or `[B, K]`; o is then bf16.
    The tiles are shared out on the device, by q_starts and the lengths there, so that a captured graph stays right when they change. The
    result of a row depends on its sequence alone, not on the batch or the run. scale must be more than 0. Errors: ValueError on CPU,
    RuntimeError on CUDA. Method: FlashAttention-3 (Shah et al. 2024).
    """
    check_positive(_OP, window=window, softcap=softcap)
    check_flag(_OP, "causal", causal)
    return torch.ops.pyllm.prefill_attention(
        q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window or 0, softcap or 0.0, sinks, mask, mask_starts, q_scale,
        k_scale, v_scale,
    )  # fmt: skip


def _check_prefill(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor | None, kv_lens: Tensor | None, page_table: Tensor | None,
    scale: float, causal: bool, window: int, softcap: float, sinks: Tensor | None, mask: Tensor | None, mask_starts: Tensor | None,
    q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
) -> None:  # fmt: skip
    fp8 = q.dtype == _FP8
    for name, t in (("k", k), ("v", v)):
        check(t.dtype == q.dtype, _OP, name, f"is {t.dtype}, expected {q.dtype} like q")
    a, b, c = (t.to(torch.bfloat16) if fp8 else t for t in (q, k, v))
    _check(_OP, a, b, c, q_starts, kv_starts, kv_lens, page_table, window, softcap, sinks, mask, mask_starts, 0)
    check(scale > 0 and scale < float("inf"), _OP, "scale", f"is {scale}, expected finite and > 0")
    dims = (q.shape[2], v.shape[-1])
    if fp8:
        check(dims[0] == dims[1] and dims[0] in PREFILL_FP8_DIMS, _OP, "q", f"has (D, Dv) {dims}, expected D = Dv of {PREFILL_FP8_DIMS}")
    else:
        check(dims in PREFILL_DIMS, _OP, "q", f"has (D, Dv) {dims}, expected one of {PREFILL_DIMS}")
    if page_table is not None:
        check(k.shape[1] >= 16, _OP, "k", f".size(1) is {k.shape[1]}, expected at least 16")
    batch, heads = q_starts.shape[0] - 1, k.shape[-2]
    for name, s, shapes in (
        ("q_scale", q_scale, ((1,), tuple(q.shape[:2]))),
        ("k_scale", k_scale, ((1,), (heads,), (batch, heads))),
        ("v_scale", v_scale, ((1,), (heads,), (batch, heads))),
    ):
        if s is not None:
            check(fp8, _OP, name, f"is given, expected it only with float8_e4m3fn, q is {q.dtype}")
            check(s.dtype == torch.float32, _OP, name, f"is {s.dtype}, expected float32")
            check(tuple(s.shape) in shapes, _OP, name, f"has shape {tuple(s.shape)}, expected one of {shapes}")


def _per_key(scale: Tensor | None, like: Tensor, starts: Tensor | None, table: Tensor | None) -> Tensor:
    """Keys or values times their scales; `[B, K]` scales reach each sequence's own keys or pages."""
    wide = like.float()
    if scale is None:
        return wide
    if scale.dim() == 1:
        return wide * scale[:, None]
    out = wide.clone()
    for b, one in enumerate(scale):
        if table is not None:
            pages = table[b][(table[b] >= 0) & (table[b] < like.shape[0])].long().unique()
            out[pages] = wide[pages] * one[:, None]
        elif starts is not None:
            rows = slice(int(starts[b]), int(starts[b + 1]))
            out[rows] = wide[rows] * one[:, None]
    return out


def _prefill_reference(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor | None, kv_lens: Tensor | None, page_table: Tensor | None,
    scale: float, causal: bool = True, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, mask: Tensor | None = None,
    mask_starts: Tensor | None = None, q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.dtype != torch.float32:
        _check_prefill(q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window, softcap, sinks, mask, mask_starts,
                       q_scale, k_scale, v_scale)  # fmt: skip
    fp8 = q.dtype == _FP8
    if fp8:
        by = torch.ones(1) if q_scale is None else q_scale
        q = q.float() * (by[..., None] if by.dim() == 2 else by)
        k, v = (_per_key(s, t, kv_starts, page_table) for s, t in ((k_scale, k), (v_scale, v)))
    out, lse = _reference(_OP, q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window, softcap, sinks, mask, mask_starts,
                          0, PLAIN, [], 0)  # fmt: skip
    return out.to(torch.bfloat16) if fp8 else out, lse


def _prefill_fake(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor | None, kv_lens: Tensor | None, page_table: Tensor | None,
    scale: float, causal: bool = True, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None, mask: Tensor | None = None,
    mask_starts: Tensor | None = None, q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if q.dtype != torch.float32:
        _check_prefill(q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window, softcap, sinks, mask, mask_starts,
                       q_scale, k_scale, v_scale)  # fmt: skip
    out = torch.bfloat16 if q.dtype == _FP8 else q.dtype
    return q.new_empty((*q.shape[:2], v.shape[-1]), dtype=out), q.new_empty(q.shape[:2], dtype=torch.float32)


define(
    "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor q_starts, Tensor? kv_starts, Tensor? kv_lens, Tensor? page_table, float scale, "
    "bool causal=True, SymInt window=0, float softcap=0.0, Tensor? sinks=None, Tensor? mask=None, Tensor? mask_starts=None, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None) -> (Tensor, Tensor)",
    stem="attention/prefill_attention",
    public="pyllm.ops.prefill.prefill_attention",
    reference=_prefill_reference,
    fake=_prefill_fake,
)
