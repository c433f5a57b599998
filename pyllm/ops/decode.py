"""Attention for a few query rows per sequence: the paged decode kernel of csrc/attention."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.attention import _attention_reference, _check_attention
from pyllm.ops.registry import check, define

_DIMS, _DTYPES, _OP = (64, 128, 256), (torch.bfloat16, torch.float16), "decode_attention"


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    q_starts: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_q: int = 1,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` (causal) of a step in which each sequence has at most max_q query rows; formula and masks as there.

    max_q sizes the launch, 1 to 64: what the host knows of q_starts. The keys are shared out over the GPU by q_starts and kv_lens, read
    on the device, so that a captured graph stays right when they change. Results do not depend on the run, but their rounding does on the
    lengths of the whole step, which decide where a sequence is cut.
    Shapes: q `[T, H, D]` with D 64, 128 or 256 (H a multiple of K), k_cache and v_cache `[pages, P, K, D]` with P a power of two >= 16,
    pages at any stride; page_table int32 `[B, W]` (entries past a sequence's last page, or below its window, are never read), q_starts
    int32 `[B + 1]`, kv_lens int32 `[B]`, sinks fp32 `[H]`, k_scale/v_scale fp32 `[1]` or `[K]`: value = stored * scale; scale, window,
    softcap as in `paged_attention`.
    Returns (o `[T, H, D]` of q's dtype, lse fp32 `[T, H]`, natural log). A row without keys gives 0 and -inf (its sink, if there are
    sinks), a row of q past q_starts[B] 0 and -inf.
    Dtypes: q bf16, fp16; caches q's dtype or float8_e4m3fn, whose scores and weights are computed in fp16 (q clamped to +-65504).
    Rounding: fp32 inside, weights once to the cache's dtype (fp16 for fp8), o once. Errors: ValueError on CPU, RuntimeError on CUDA.
    Method: flash attention with split keys (Dao et al. 2023), shares as in Stream-K (Osama et al. 2023).
    """
    for name, value in (("window", window), ("softcap", softcap)):
        check(value is None or value > 0, _OP, name, f"is {value}, expected more than 0 (or None)")
    return torch.ops.pyllm.decode_attention(
        q, k_cache, v_cache, page_table, q_starts, kv_lens, scale, window or 0, softcap or 0.0, sinks, k_scale, v_scale, max_q
    )


def _check_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, window: int, softcap: float,
    sinks: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, max_q: int,
) -> None:  # fmt: skip
    _check_attention(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, sinks, k_scale, v_scale, _OP)
    check(q.dtype in _DTYPES, _OP, "q", f"is {q.dtype}, expected bfloat16 or float16")
    check(q.shape[2] in _DIMS, _OP, "q", f".size(2) is {q.shape[2]}, expected 64, 128 or 256")
    page = k_cache.shape[1]
    check(page >= 16 and page & (page - 1) == 0, _OP, "k_cache", f".size(1) is {page}, expected a power of two, at least 16")
    check(softcap >= 0, _OP, "softcap", f"is {softcap}, expected finite and > 0 (or None)")
    check(1 <= max_q <= 64, _OP, "max_q", f"is {max_q}, expected 1 to 64")
    check(sinks is None or sinks.dtype == torch.float32, _OP, "sinks", f"is {sinks.dtype if sinks is not None else ''}, expected float32")


def _decode_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, max_q: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_decode(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, softcap, sinks, k_scale, v_scale, max_q)
    most = int(q_starts.diff().max()) if len(kv_lens) else 0
    check(most <= max_q, _OP, "max_q", f"is {max_q}, expected at least the {most} query rows of the longest sequence")
    return _attention_reference(q, k_cache, v_cache, page_table, q_starts, kv_lens, scale, True, window, softcap, sinks, k_scale, v_scale)


def _decode_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, scale: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, max_q: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_decode(q, k_cache, v_cache, page_table, q_starts, kv_lens, window, softcap, sinks, k_scale, v_scale, max_q)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


define(
    "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor q_starts, Tensor kv_lens, float scale, "
    "SymInt window=0, float softcap=0.0, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, int max_q=1) -> (Tensor, Tensor)",
    stem="attention/decode_attention",
    public="pyllm.ops.decode.decode_attention",
    reference=_decode_reference,
    fake=_decode_fake,
)
