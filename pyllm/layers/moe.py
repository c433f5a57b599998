"""MoE: a router, stacked gated experts, optional shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyllm import ops
from pyllm.layers.linear import Linear
from pyllm.layers.mlp import MLP, check_act
from pyllm.layers.norm import Normed
from pyllm.layers.spec import Part, Spec, Weight, need_sizes
from pyllm.ops.moe import SCORING
from pyllm.runtime.batch import Batch


@dataclass(frozen=True)
class MoE(Spec):
    """`sum over the top_k experts of weight * expert(x) [+ shared(x), gated by sigmoid(shared_gate x) where there is one]`.

    scoring: "softmax" (over all experts, then top-k), "topk_softmax" (top-k, then softmax), "sigmoid". renormalize: chosen weights sum
    to 1.
    correction: checkpoint name of a bias `[experts]` for the choice alone. names: gate, up, down of one expert, `{}` is its number.
    """

    at: str
    d: int
    ff: int
    experts: int
    top_k: int
    act: str = "silu"
    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    correction: str | None = None
    shared: MLP | None = None
    shared_gate: str | None = None
    router: str = "gate"
    names: tuple[str, str, str] = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")

    partial = True
    reads_normed = True

    def __post_init__(self) -> None:
        check_act(f"MoE {self.at}", self.act)
        need_sizes(f"MoE {self.at}", d=self.d, ff=self.ff, experts=self.experts, top_k=self.top_k)
        if len(self.names) != 3 or not all("{}" in n for n in self.names):
            raise ValueError(f"MoE {self.at}: names is {self.names!r}, expected three (gate, up, down) with {{}} for the expert")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"MoE {self.at}: top_k is {self.top_k}, expected 1..experts={self.experts}")
        if self.scoring not in SCORING:
            raise ValueError(f"MoE {self.at}: scoring is {self.scoring!r}, expected one of {', '.join(SCORING)}")
        if self.shared_gate and not self.shared:
            raise ValueError(f"MoE {self.at}: shared_gate is {self.shared_gate!r}, but there is no shared expert")

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        gate, up, down = self.names
        out: dict[str, Spec | tuple[Spec, ...]] = {
            "gate": Linear(self.d, (Part(self.router, self.experts),)),
            "w13": Linear(self.d, (Part(gate, self.ff), Part(up, self.ff)), "col", experts=self.experts),
            "w2": Linear(self.ff, (Part(down, self.d),), "row", experts=self.experts),
        }
        if self.shared:
            out["shared"] = self.shared
        if self.shared_gate:
            out["shared_gate_proj"] = Linear(self.d, (Part(self.shared_gate, 1),))
        return out

    def weights(self) -> dict[str, Weight]:
        return {"router_bias": Weight((Part(self.correction, self.experts),), suffix="", fp32=True)} if self.correction else {}

    def load(self, m: Any, env: Any) -> None:
        super().load(m, env)
        if m.w13.format != m.w2.format:
            raise ValueError(f"quant plan: the experts of {m.path} get two formats ({m.w13.format.name}, {m.w2.format.name}), expected one")

    def forward(self, m: Any, x: Tensor | Normed, b: Batch) -> Tensor:
        h = x.tensor() if isinstance(x, Normed) else x
        bias = m.router_bias if self.correction else None
        weights, ids = ops.route_experts(m.gate(h), self.top_k, self.scoring, renormalize=self.renormalize, bias=bias, scale=self.scale)
        y = m.w13.format.experts(m.w13, m.w2, h, ids, weights, self.act)
        if self.shared:
            s = m.shared(h, b)
            y = y + (s * torch.sigmoid(m.shared_gate_proj(h)) if self.shared_gate else s)
        return y
