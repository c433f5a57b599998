"""Matrix products: the fixed contract of every Linear. On CUDA a torch composition (cuBLAS) until the kernels of csrc/gemm exist."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm.ops.registry import check, define

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`y[t, n] = sum_k x[t, k] * weight[n, k] + bias[n]`.

    Shapes: x `[T, K]`, weight `[N, K]`, bias `[N]` -> y `[T, N]`. Dtypes: one of bf16, fp16, fp32 for all; accumulation in fp32, one
    rounding.
    Errors: sizes or dtypes that disagree, by name. CUDA: cuBLAS through torch.
    """
    return torch.ops.pyllm.linear(x, weight, bias)


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    op = "linear"
    check(x.dim() == 2, op, "x", f"has {x.dim()} dimensions, expected 2")
    check(x.dtype in FLOATS, op, "x", f"is {x.dtype}, expected bfloat16, float16 or float32")
    check(weight.dim() == 2, op, "weight", f"has {weight.dim()} dimensions, expected 2")
    check(weight.shape[1] == x.shape[1], op, "weight", f".size(1) is {weight.shape[1]}, expected K={x.shape[1]} (from x)")
    check(weight.dtype == x.dtype, op, "weight", f"is {weight.dtype}, expected {x.dtype} like x")
    if bias is not None:
        check(bias.shape == weight.shape[:1], op, "bias", f"has shape {tuple(bias.shape)}, expected N={weight.shape[0]} (from weight)")
        check(bias.dtype == x.dtype, op, "bias", f"is {bias.dtype}, expected {x.dtype} like x")


def _linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _check_linear(x, weight, bias)
    return x.new_empty(x.shape[0], weight.shape[0])


define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    stem="gemm/linear",
    public="pyllm.ops.gemm.linear",
    reference=_linear_reference,
    fake=_linear_fake,
    composition=_linear_reference,
)
