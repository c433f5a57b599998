"""MLP: gated (SwiGLU, GeGLU) or plain, one fused GEMM in, one out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyllm.layers.inputs import Summed
from pyllm.layers.linear import Linear
from pyllm.layers.norm import Normed
from pyllm.layers.spec import Part, Spec, Transform, consecutive, need_sizes
from pyllm.ops.fused import ACTS
from pyllm.runtime.batch import Batch


def check_act(owner: str, act: str) -> None:
    if act not in ACTS:
        raise ValueError(f"{owner}: act is {act!r}, expected one of {', '.join(ACTS)}")


@dataclass(frozen=True)
class MLP(Spec):
    """`down(act(gate x) * (up x))`, or `down(act(up x))` when not gated. act: silu, gelu, gelu_tanh, relu2.

    names: gate, up, down; one name for gate and up is one fused tensor. transform: TRANSPOSE where the checkpoint stores W^T.
    """

    at: str
    d: int
    ff: int
    act: str = "silu"
    gated: bool = True
    bias: bool = False
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transform: Transform | None = None

    partial = True
    reads_normed = True

    def __post_init__(self) -> None:
        check_act(f"MLP {self.at}", self.act)
        need_sizes(f"MLP {self.at}", d=self.d, ff=self.ff)
        if len(self.names) != 3:
            raise ValueError(f"MLP {self.at}: names is {self.names!r}, expected three (gate, up, down)")

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        gate, up, down = self.names
        parts = consecutive(Part(gate, self.ff), Part(up, self.ff)) if self.gated else (Part(up, self.ff),)
        return {
            "up": Linear(self.d, parts, "col", self.bias, transform=self.transform),
            "down": Linear(self.ff, (Part(down, self.d),), "row", self.bias, transform=self.transform),
        }

    def forward(self, m: Any, x: Tensor | Normed, b: Batch) -> Tensor | Summed:
        h = m.up.spec.gated(m.up, x, self.act, m.down) if self.gated else m.up.spec.activated(m.up, x, self.act, m.down)
        return m.down.spec.into(m.down, h, x)
