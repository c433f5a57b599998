"""What a Linear may be given in place of rows: values still to be computed, so that the op that computes them can also round them to what
the Linear's format multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm import ops


def quantized(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """e4m3 rows with a scale each, or with the given one for all."""
    return ops.quantize_fp8(x, "token") if scale is None else (ops.quantize_fp8(x, "static", scale)[0], scale)


class Pending:
    """Rows `[T, K]` that are not computed yet: as a tensor of `dtype`, or as e4m3 with a scale per row or a given one; each at most
    once. shape, device: of the rows."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device

    def tensor(self) -> Tensor:
        raise NotImplementedError

    def e4m3(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`(q [T, K], scale [T])`, as `quantize_fp8` has them, or q with the given scale `[1]`."""
        return quantized(self.tensor(), scale)


class Summed:
    """What a body gives whose last product has added to the residual stream in its epilogue: the stream itself."""

    def __init__(self, stream: Tensor) -> None:
        self.stream = stream


class Gated(Pending):
    """`act(gate) * up` of rows `[gate | up]`; done: rows are that already."""

    def __init__(self, rows: Tensor, act: str, done: bool = False) -> None:
        self.rows, self.act, self.dtype, self.done = rows, act, rows.dtype, done
        self.shape, self.device = rows.shape if done else torch.Size((len(rows), rows.shape[1] // 2)), rows.device

    def tensor(self) -> Tensor:
        return self.rows if self.done else ops.act_mul(self.rows, self.act)

    def e4m3(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().e4m3(scale) if self.done else ops.act_mul_fp8(self.rows, self.act, scale)


class Rounded(Pending):
    """Rows of e4m3 that a product has written with the scale that the next one asked for."""

    def __init__(self, rows: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.rows, self.scale, self.dtype, self.shape, self.device = rows, scale, dtype, rows.shape, rows.device

    def tensor(self) -> Tensor:
        return (self.rows.float() * self.scale).to(self.dtype)

    def e4m3(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return (self.rows, self.scale) if scale is self.scale else super().e4m3(scale)
