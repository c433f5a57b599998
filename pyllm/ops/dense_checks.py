"""Argument checks that the dense GEMMs share; the native checks use the same wording."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.registry import check

HALVES = (torch.bfloat16, torch.float16)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_rows(op: str, name: str, t: Tensor) -> None:
    item = t.element_size()
    check(t.stride(1) == 1, op, name, f".stride(1) is {t.stride(1)}, expected 1")
    aligned = t.shape[0] <= 1 or t.stride(0) * item % 16 == 0
    check(aligned, op, name, f".stride(0) is {t.stride(0)} elements, expected a multiple of {16 // item}")


def check_operands(op: str, x: Tensor, weight: Tensor, dtypes: tuple[torch.dtype, ...], granule: int) -> None:
    for name, t in (("x", x), ("weight", weight)):
        check(t.dim() == 2, op, name, f"has {t.dim()} dimensions, expected 2")
    check(x.dtype in dtypes, op, "x", f"is {name_of(x.dtype)}, expected {' or '.join(name_of(d) for d in dtypes)}")
    check(weight.dtype == x.dtype, op, "weight", f"is {name_of(weight.dtype)}, expected {name_of(x.dtype)} like x")
    (k, n), limit = (x.shape[1], weight.shape[0]), 1 << 31
    check(weight.shape[1] == k, op, "weight", f".size(1) is {weight.shape[1]}, expected K={k} (from x)")
    fits = 16 <= k < limit and k % granule == 0
    check(fits, op, "x", f".size(1) is {k}, expected a multiple of {granule} from 16 to 2^31 - 1")
    fits = 16 <= n < limit and n % granule == 0
    check(fits, op, "weight", f".size(0) is {n}, expected a multiple of {granule} from 16 to 2^31 - 1")
    check_rows(op, "x", x)
    check_rows(op, "weight", weight)


def check_bias(op: str, bias: Tensor | None, n: int, dtype: torch.dtype) -> None:
    if bias is None:
        return
    check(bias.dim() == 1, op, "bias", f"has {bias.dim()} dimensions, expected 1")
    check(bias.shape[0] == n, op, "bias", f".size(0) is {bias.shape[0]}, expected N={n}")
    check(bias.dtype == dtype, op, "bias", f"is {name_of(bias.dtype)}, expected {name_of(dtype)}")
    check(bias.is_contiguous(), op, "bias", "is not contiguous")


def check_scale(op: str, name: str, scale: Tensor, letter: str, rows: int) -> None:
    check(scale.dim() == 1, op, name, f"has {scale.dim()} dimensions, expected 1")
    check(scale.dtype == torch.float32, op, name, f"is {name_of(scale.dtype)}, expected float32")
    check(scale.shape[0] in (1, rows), op, name, f".size(0) is {scale.shape[0]}, expected 1 or {letter}={rows}")
    check(scale.is_contiguous(), op, name, "is not contiguous")


def check_blocks(op: str, name: str, scale: Tensor, rows: int, columns: int) -> None:
    check(scale.dim() == 2, op, name, f"has {scale.dim()} dimensions, expected 2")
    check(scale.dtype == torch.float32, op, name, f"is {name_of(scale.dtype)}, expected float32")
    check(tuple(scale.shape) == (rows, columns), op, name, f"has shape {list(scale.shape)}, expected {[rows, columns]}")
    check(columns <= 1 or scale.stride(1) == 1, op, name, f".stride(1) is {scale.stride(1)}, expected 1")


def dense_serves(x: Tensor, weight: Tensor) -> bool:
    """Whether `dense_linear` takes these two: sm_90, bf16 or fp16, N and K multiples of 8 from 16 on, rows at multiples of 16 bytes."""
    if x.dtype not in HALVES or not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    sizes = all(size >= 16 and size % 8 == 0 for size in weight.shape)
    return sizes and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, weight))
