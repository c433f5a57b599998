"""Products and attention whose bits, for one row, do not depend on the other rows of the step: what `bind(invariant=True)` runs on CUDA.

They are choices among the kernels, not kernels of their own: cuBLAS never, and of ours those whose order of summation is a function of the
weight (of a sequence's own length) alone. A CPU's matrix product depends on the number of rows; there the executor runs each sequence
by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm.ops.decode import decode_attention
from pyllm.ops.dense import dense_linear, linear_fp8
from pyllm.ops.gemm import linear
from pyllm.ops.norm import quantize_fp8
from pyllm.ops.prefill import prefill_attention

ROWS = 256
"""`dense_plan.h` picks one tile, and so one way to cut K, for all products of up to so many rows."""
FEWEST = 65
"""Products of up to 64 rows have kernels and cuts of K of their own, which sum in another order."""


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` with one order of summation for any number of rows. x `[T, K]`, weight `[N, K]`, bias `[N]` -> `[T, N]`, of one dtype.

    CUDA: `dense_linear` over blocks of up to 256 rows, so bf16 or fp16, K and N multiples of 8 from 16 on. CPU: `linear`.
    """
    if not x.is_cuda:
        return linear(x, weight, bias)
    rows, missing = len(x), _missing(len(x))
    x = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    return _join([dense_linear(part, weight, bias) for part in x.split(ROWS)])[:rows]


def invariant_linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """`linear_fp8` with one order of summation for any number of rows; x_scale `[T]`. Same shapes, dtypes and errors."""
    if not x.is_cuda:
        return linear_fp8(x, weight, x_scale, weight_scale, bias, dtype)
    rows, missing = len(x), _missing(len(x))
    if missing:
        x, x_scale = F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype), F.pad(x_scale, (0, missing))
    parts = zip(x.split(ROWS), x_scale.split(ROWS), strict=True)
    return _join([linear_fp8(part, weight, scale, weight_scale, bias, dtype) for part, scale in parts])[:rows]


def invariant_attention(
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
    max_q: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` whose rows depend on their own sequence, and on whether the step has max_q = 1.

    CUDA: `decode_attention` in its invariant mode where max_q is 1, else `prefill_attention` for all rows, of an fp8 cache with q quantized
    by (token, head). The two round differently, so a step must not mix generating sequences with prompts. All else as there.
    """
    masks: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": None if sinks is None else sinks.float()}
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if max_q == 1:
        return decode_attention(q, k_cache, v_cache, page_table, q_starts, kv_lens, **masks, **scales, invariant=True)
    paged: dict[str, Any] = {"kv_lens": kv_lens, "page_table": page_table}
    if k_cache.dtype != torch.float8_e4m3fn:
        return prefill_attention(q, k_cache, v_cache, q_starts, **paged, **masks)
    rows, q_scale = quantize_fp8(q.flatten(0, 1).contiguous(), "token")
    return prefill_attention(rows.view(q.shape), k_cache, v_cache, q_starts, **paged, **masks, **scales, q_scale=q_scale.view(q.shape[:2]))


def _missing(rows: int) -> int:
    """Rows that the last block lacks to be one of at least `FEWEST`."""
    last = rows % ROWS
    return max(FEWEST - last, 0) if last else 0


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
