"""A norm between two products of prefill without an op of its own: the first sums its results' squares, the second divides by them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.dense_checks import HALVES, check_bias, check_operands, check_rows, name_of
from pyllm.ops.fused import ACTS, activation
from pyllm.ops.registry import check, check_flag, define

COLUMNS = 128
"""Columns of a row whose squares are one sum."""


def linear_squares(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`y = dense_linear(x, weight, bias, residual=residual)`, and the sums of y's squares over each 128 columns of a row.

    Args:
        x, weight, bias, residual: as in `dense_linear`.

    Returns:
        y `[M, N]` of x.dtype, and fp32 `[M, ceil(N / 128)]`, both contiguous. The squares are those of the rounded y; the order of a sum is
        fixed.

    Raises:
        ValueError (RuntimeError on CUDA): as `dense_linear`.
    """
    return torch.ops.pyllm.linear_squares(x, weight, residual, bias)


def linear_normed(
    x: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, *, act: str | None = None, gated: bool = False
) -> Tensor:
    """`dense_linear` of RMSNorm's rows: `y = f(rsqrt(sum(squares[m]) / K + eps) * sum_k x[m, k] * weight[n, k] + bias[n])`.

    The norm's own weight is in this one already: `weight[n, k] * norm_weight[k]`, rounded once more.

    Args:
        x: `[M, K]` rows, bf16 or fp16, not normed; weight, bias, act, gated: as in `dense_linear`.
        squares: fp32 `[M, ceil(K / 128)]`, contiguous: what `linear_squares` gives beside x.
        eps: of the norm.

    Returns:
        `[M, N]` (gated `[M, F]`) of x.dtype, contiguous. Accumulation in fp32, one rounding at the end.

    Raises:
        ValueError (RuntimeError on CUDA): as `dense_linear`.
    """
    check(act is None or act in ACTS, "linear_normed", "act", f"is {act!r}, expected None or one of {', '.join(ACTS)}")
    check_flag("linear_normed", "gated", gated)
    return torch.ops.pyllm.linear_normed(x, squares, eps, weight, bias, -1 if act is None else ACTS[act], gated)


def _check_squares(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> None:
    op = "linear_squares"
    check_operands(op, x, weight, HALVES, 8)
    check_bias(op, bias, weight.shape[0], x.dtype)
    check(residual.dim() == 2, op, "residual", f"has {residual.dim()} dimensions, expected 2")
    check(residual.shape[0] == x.shape[0], op, "residual", f".size(0) is {residual.shape[0]}, expected M={x.shape[0]} (from x)")
    check(residual.shape[1] == weight.shape[0], op, "residual", f".size(1) is {residual.shape[1]}, expected {weight.shape[0]}")
    check(residual.dtype == x.dtype, op, "residual", f"is {name_of(residual.dtype)}, expected {name_of(x.dtype)} like x")
    check_rows(op, "residual", residual)


def _squares_reference(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_squares(x, weight, residual, bias)
    y = torch.ops.pyllm.dense_linear(x, weight, bias, residual)
    parts = torch.nn.functional.pad(y.float().square(), (0, -y.shape[1] % COLUMNS)).unflatten(1, (-1, COLUMNS))
    return y, parts.sum(2)


def _squares_fake(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    _check_squares(x, weight, residual, bias)
    m, n = x.shape[0], weight.shape[0]
    return x.new_empty(m, n), x.new_empty((m, -(-n // COLUMNS)), dtype=torch.float32)


def _check_normed(x: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None, act: int, gated: bool) -> tuple[int, int]:
    """Shape of the result."""
    op = "linear_normed"
    check_operands(op, x, weight, HALVES, 8)
    (m, k), n = x.shape, weight.shape[0]
    check(not gated or n % 16 == 0, op, "weight", f".size(0) is {n}, expected a multiple of 16 with gated")
    check(-1 <= act <= 3, op, "act", f"is {act}, expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)")
    check(0.0 <= eps < float("inf"), op, "eps", f"is {eps:g}, expected finite and >= 0")
    check(squares.dim() == 2, op, "squares", f"has {squares.dim()} dimensions, expected 2")
    check(squares.shape[0] == m, op, "squares", f".size(0) is {squares.shape[0]}, expected M={m} (from x)")
    check(squares.dtype == torch.float32, op, "squares", f"is {name_of(squares.dtype)}, expected float32")
    check(squares.is_contiguous(), op, "squares", "is not contiguous")
    check(squares.shape[1] == -(-k // COLUMNS), op, "squares", f".size(1) is {squares.shape[1]}, expected {-(-k // COLUMNS)}")
    check_bias(op, bias, n, x.dtype)
    return m, n // 2 if gated else n


def _normed_reference(x: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None, act: int, gated: bool) -> Tensor:
    _check_normed(x, squares, eps, weight, bias, act, gated)
    y = x.float() @ weight.float().T * torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + eps)
    y = y if bias is None else y + bias.float()
    if gated:
        y, up = y.chunk(2, dim=1)
        return ((y if act < 0 else activation(y, act)) * up).to(x.dtype)
    return (y if act < 0 else activation(y, act)).to(x.dtype)


def _normed_fake(x: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None, act: int, gated: bool) -> Tensor:
    return x.new_empty(_check_normed(x, squares, eps, weight, bias, act, gated))


define(
    "linear_squares(Tensor x, Tensor weight, Tensor residual, Tensor? bias) -> (Tensor, Tensor)",
    stem="gemm/dense_linear",
    public="pyllm.ops.dense_norm.linear_squares",
    reference=_squares_reference,
    fake=_squares_fake,
)
define(
    "linear_normed(Tensor x, Tensor squares, float eps, Tensor weight, Tensor? bias, int act, bool gated) -> Tensor",
    stem="gemm/dense_linear",
    public="pyllm.ops.dense_norm.linear_normed",
    reference=_normed_reference,
    fake=_normed_fake,
)
