"""Argument checks that the ops over a paged cache share; the native checks use the same wording."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.gemm import FLOATS
from pyllm.ops.registry import check


def check_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, window: int, sinks: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, op: str = "paged_attention",
) -> None:  # fmt: skip
    check(q.dim() == 3, op, "q", f"has {q.dim()} dimensions, expected 3 [T, H, D]")
    check(q.dtype in FLOATS, op, "q", f"is {q.dtype}, expected bfloat16, float16 or float32")
    check(k_cache.dim() == 4, op, "k_cache", f"has {k_cache.dim()} dimensions, expected 4 [pages, P, K, D]")
    check(v_cache.shape == k_cache.shape, op, "v_cache", f"has shape {tuple(v_cache.shape)}, expected {tuple(k_cache.shape)} like k_cache")
    check(k_cache.shape[3] == q.shape[2], op, "k_cache", f".size(3) is {k_cache.shape[3]}, expected D={q.shape[2]} (from q)")
    check(k_cache.shape[2] >= 1, op, "k_cache", ".size(2) is 0, expected K >= 1")
    check(
        q.shape[1] % k_cache.shape[2] == 0, op, "q", f"has H={q.shape[1]} heads, expected a multiple of K={k_cache.shape[2]} (from k_cache)"
    )
    check(k_cache.dtype in (q.dtype, torch.float8_e4m3fn), op, "k_cache", f"is {k_cache.dtype}, expected {q.dtype} like q or float8_e4m3fn")
    check(v_cache.dtype == k_cache.dtype, op, "v_cache", f"is {v_cache.dtype}, expected {k_cache.dtype} like k_cache")
    for name, t, dims in (("page_table", page_table, 2), ("q_starts", q_starts, 1), ("kv_lens", kv_lens, 1)):
        check(t.dtype == torch.int32, op, name, f"is {t.dtype}, expected int32")
        check(t.dim() == dims, op, name, f"has {t.dim()} dimensions, expected {dims}")
    check(
        kv_lens.shape[0] == page_table.shape[0],
        op,
        "kv_lens",
        f".size(0) is {kv_lens.shape[0]}, expected B={page_table.shape[0]} (from page_table)",
    )
    check(
        q_starts.shape[0] == kv_lens.shape[0] + 1, op, "q_starts", f".size(0) is {q_starts.shape[0]}, expected B+1={kv_lens.shape[0] + 1}"
    )
    check(window >= 0, op, "window", f"is {window}, expected >= 1 (or None)")
    if sinks is not None:
        check(sinks.shape == q.shape[1:2], op, "sinks", f"has shape {tuple(sinks.shape)}, expected H={q.shape[1]} (from q)")
        wide_sinks(op, sinks)
    for name, s in (("k_scale", k_scale), ("v_scale", v_scale)):
        if s is not None:
            check(s.dtype == torch.float32, op, name, f"is {s.dtype}, expected float32")
            heads = k_cache.shape[2]
            check(s.shape in ((1,), (heads,)), op, name, f"has shape {tuple(s.shape)}, expected 1 or K={heads} (from k_cache)")


def wide_sinks(op: str, sinks: Tensor) -> Tensor:
    check(sinks.dtype in FLOATS, op, "sinks", f"is {sinks.dtype}, expected bfloat16, float16 or float32")
    return sinks.float()


def as_q(cache: Tensor, q: Tensor) -> Tensor:
    """int8 values are exact in 16 bits."""
    return cache.to(q.dtype) if cache.dtype == torch.int8 else cache


def check_any_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, window: int, sinks: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, op: str,
) -> None:  # fmt: skip
    """`check_attention`, for int8 caches too."""
    check(v_cache.dtype == k_cache.dtype, op, "v_cache", f"is {v_cache.dtype}, expected {k_cache.dtype} like k_cache")
    wide = (as_q(k_cache, q), as_q(v_cache, q))
    check_attention(q, *wide, page_table, q_starts, kv_lens, window, sinks, k_scale, v_scale, op)


def explain(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, q_starts: Tensor, kv_lens: Tensor, *, window: int | None = None,
    sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, **_: object,
) -> None:  # fmt: skip
    """What is wrong with a call of `paged_attention` that another op has refused, in the names of its own arguments."""
    check_any_cache(q, k_cache, v_cache, page_table, q_starts, kv_lens, window or 0, sinks, k_scale, v_scale, "paged_attention")


def check_values(q: Tensor, k_cache: Tensor, page_table: Tensor, starts: list[int], lens: list[int]) -> None:
    """What only the reference can see without a sync: numbers inside the index tensors."""
    op, most = "paged_attention", page_table.shape[1] * k_cache.shape[1]
    rising = starts == sorted(starts) and 0 <= starts[0] and starts[-1] <= q.shape[0]
    check(rising, op, "q_starts", f"is {starts}, expected rising numbers from 0 to T={q.shape[0]}")
    for i, length in enumerate(lens):
        n = starts[i + 1] - starts[i]
        if n and length:  # a padded sequence has a row and no keys
            check(n <= length, op, "kv_lens", f"[{i}] is {length}, expected at least the sequence's {n} query rows")
            check(length <= most, op, "kv_lens", f"[{i}] is {length}, expected at most the {most} tokens of a page_table row")
            for page in page_table[i, : -(-length // k_cache.shape[1])].tolist():
                check(0 <= page < k_cache.shape[0], op, "page_table", f"[{i}] holds page {page}, expected 0..{k_cache.shape[0] - 1}")
