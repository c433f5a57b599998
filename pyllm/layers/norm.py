"""RMSNorm, LayerNorm, and `Normed`: the residual stream seen through a norm, which is what a body receives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm import ops
from pyllm.layers.inputs import Pending
from pyllm.layers.spec import Part, Spec, Split, Transform, Weight, need_sizes


def check_norm(norm: RMSNorm | LayerNorm) -> None:
    owner = f"{type(norm).__name__} {norm.name}"
    need_sizes(owner, d=norm.d)
    if not 0 <= norm.eps < math.inf:
        raise ValueError(f"{owner}: eps is {norm.eps}, expected 0 or more, and finite")


@dataclass(frozen=True)
class RMSNorm(Spec):
    """`y = x / sqrt(mean(x^2) + eps) * w`; plus_one: the checkpoint stores w - 1 (Gemma). w is kept in fp32; fp32 inside, one rounding.

    Called with a residual, adds x to it in place first and normalises the sum: one op. With quant="token" the result is e4m3 rows and
    their scales, with "static" e4m3 rows of the given scale, in the same op.
    stored=False: the checkpoint has no w, which is 1.
    unit: the row is cut over the ranks in units of so many values, as in `Part` (None: each rank has all of it); who holds it sums the
    squares over the ranks.
    """

    name: str
    d: int
    eps: float
    plus_one: bool = False
    unit: int | None = None
    stored: bool = True

    def __post_init__(self) -> None:
        check_norm(self)
        if not self.stored and (self.plus_one or self.unit):
            raise ValueError(f"RMSNorm {self.name}: stored is off, expected neither plus_one nor unit with it")

    def load(self, m: Any, env: Any) -> None:
        super().load(m, env)
        if not self.stored:
            m.put("weight", torch.ones(self.d, device=env.device))

    def weights(self) -> dict[str, Weight]:
        if not self.stored:
            return {}
        part = Part(self.name, self.d, self.unit or 1, Split.REPLICATE)
        change = Transform.PLUS_ONE if self.plus_one else None
        return {"weight": Weight((part,), shard="col" if self.unit else None, transform=change, fp32=True)}

    def forward(self, m: Any, x: Tensor, residual: Tensor | None = None, quant: str | None = None, scale: Tensor | None = None) -> Any:
        return ops.rms_norm(x, m.weight, self.eps, residual, quant, scale)


@dataclass(frozen=True)
class LayerNorm(Spec):
    """`y = (x - mean) / sqrt(var + eps) * w + b`; bias=False: no b; plus_one: the checkpoint stores w - 1 (Nemotron).

    w, b are kept in fp32; fp32 inside, one rounding.
    heads > 0: a row is so many heads of d, each with its own mean, variance and w `[heads, d]` (no b); cut over the ranks by heads;
    a torch composition.
    """

    name: str
    d: int
    eps: float
    bias: bool = True
    plus_one: bool = False
    heads: int = 0

    def __post_init__(self) -> None:
        check_norm(self)
        if self.heads and self.bias:
            raise ValueError(f"LayerNorm {self.name}: heads is {self.heads}, expected bias=False with it")

    def weights(self) -> dict[str, Weight]:
        part = (Part(self.name, self.d),)
        change = Transform.PLUS_ONE if self.plus_one else None
        if self.heads:
            by_head = (Part(self.name, self.heads, split=Split.REPLICATE),)
            return {"weight": Weight(by_head, self.d, "col", transform=change, fp32=True)}
        return {"weight": Weight(part, transform=change, fp32=True)} | (
            {"bias": Weight(part, suffix="bias", fp32=True)} if self.bias else {}
        )

    def forward(self, m: Any, x: Tensor, residual: Tensor | None = None, quant: str | None = None, scale: Tensor | None = None) -> Any:
        if self.heads:
            rows = F.layer_norm(x.float().unflatten(-1, (-1, self.d)), (self.d,), eps=self.eps)
            return (rows * m.weight).flatten(-2).to(x.dtype)
        return ops.layer_norm(x, m.weight, m.bias if self.bias else None, self.eps, residual, quant, scale)


Norm = RMSNorm | LayerNorm


class Normed(Pending):
    """What a body receives: the residual `[T, d]` and the norm it is read through. `tensor()` is the normed value, computed once, `e4m3()`
    the same as rows of e4m3 with their scales.

    delta, if not None, is the previous step's output, still to be added to the residual: the op that normalises adds it first.
    """

    def __init__(self, residual: Tensor, norm: Any = None, delta: Tensor | None = None) -> None:
        self.residual, self.norm, self.delta, self.dtype = residual, norm, delta, residual.dtype
        self.shape, self.device = residual.shape, residual.device
        self.open = False  # a body's last product may add to the residual itself, and give the sum as a `Summed`
        self._value: Tensor | None = None
        self._e4m3: tuple[Tensor, Tensor, Tensor | None] | None = None  # and the scale that was asked for

    def tensor(self) -> Tensor:
        if self._value is None:
            if self.norm is None:
                self.settle()
                self._value = self.residual
            elif self.delta is None:
                self._value = self.norm(self.residual)
            else:
                self._value, self.delta = self.norm(self.delta, self.residual), None
        return self._value

    def e4m3(self, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if self._e4m3 is not None and self._e4m3[2] is scale:
            return self._e4m3[:2]
        if self._value is not None or self.norm is None or self._e4m3 is not None:
            return super().e4m3(scale)
        quant = "token" if scale is None else "static"
        if self.delta is None:
            found = self.norm(self.residual, None, quant, scale)
        else:
            found, self.delta = self.norm(self.delta, self.residual, quant, scale), None
        rows, own = found if scale is None else (found, scale)
        self._e4m3 = rows, own, scale
        return rows, own

    @property
    def unread(self) -> bool:
        """A product may still apply the norm itself: an RMSNorm of a complete residual, not computed yet."""
        return self.norm is not None and isinstance(self.norm.spec, RMSNorm) and self.delta is None and self._value is None

    def settle(self) -> None:
        """Make sure that the previous step's output has been added to the residual."""
        if self.delta is not None:
            self.residual.add_(self.delta)
            self.delta = None
