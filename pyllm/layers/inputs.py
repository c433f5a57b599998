"""What a Linear may be given in place of rows: values still to be computed, so that the op that computes them can also round them to what
the Linear's format multiplies."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm import ops


class Pending:
    """Rows `[T, K]` that are not computed yet: as a tensor of `dtype`, or as e4m3 with a scale per row; each at most once."""

    dtype: torch.dtype

    def tensor(self) -> Tensor:
        raise NotImplementedError

    def e4m3(self) -> tuple[Tensor, Tensor]:
        """`(q [T, K], scale [T])`, as `quantize_fp8` has them."""
        return ops.quantize_fp8(self.tensor(), "token")


class Summed:
    """What a body gives whose last product has added to the residual stream in its epilogue: the stream itself."""

    def __init__(self, stream: Tensor) -> None:
        self.stream = stream


class Gated(Pending):
    """`act(gate) * up` of rows `[gate | up]`; done: rows are that already."""

    def __init__(self, rows: Tensor, act: str, done: bool = False) -> None:
        self.rows, self.act, self.dtype, self.done = rows, act, rows.dtype, done

    def tensor(self) -> Tensor:
        return self.rows if self.done else ops.act_mul(self.rows, self.act)

    def e4m3(self) -> tuple[Tensor, Tensor]:
        return super().e4m3() if self.done else ops.act_mul_fp8(self.rows, self.act)
