"""MoE: a router, stacked gated experts, optional shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm import ops
from pyllm.layers.linear import Linear
from pyllm.layers.mlp import MLP, check_act
from pyllm.layers.norm import Normed
from pyllm.layers.spec import Part, Spec, Transform, Weight, consecutive, need_sizes
from pyllm.ops.moe import SCORING
from pyllm.runtime.batch import Batch


@dataclass(frozen=True)
class MoE(Spec):
    """`sum over the top_k experts of weight * expert(x) [+ shared(x), gated by sigmoid(shared_gate x) where there is one]`.

    scoring: "softmax" (over all experts, then top-k), "topk_softmax" (top-k, then softmax), "sigmoid". renormalize: chosen weights sum
    to 1.
    correction: checkpoint name of a bias `[experts]` for the choice alone. groups: (of how many, from how many of them) experts are chosen,
    as in `route_experts`. names: gate, up, down of one expert, `{}` is its number.
    bias: of the router and of every product of an expert. clamp: (alpha, limit) makes an expert's gated activation
    `g sigmoid(alpha g) (u + 1)` with g at most limit and u within -limit .. limit; act has no effect on it then.
    stacked: names are without `{}`, each one checkpoint tensor of all experts, `[experts, in, out]`; one name for gate and up is one
    tensor, gate rows first, or with interleaved a row of each in turn.
    fp32_router: weight and product of the router are fp32 whatever the model's dtype and the quant plan: bf16 has 8 bits, and with hundreds
    of experts the scores of the last chosen and the first not chosen differ in fewer (DeepSeek).
    scale_inputs: the weight multiplies an expert's input in place of its output (Llama 4); with top_k 1 alone.
    On CUDA the experts of bf16, fp16 and e4m3 weights are grouped GEMMs (`fused_experts`).
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
    bias: bool = False
    clamp: tuple[float, float] | None = None
    stacked: bool = False
    interleaved: bool = False
    scale_inputs: bool = False
    groups: tuple[int, int] | None = None
    fp32_router: bool = False

    partial = True
    reads_normed = True

    def __post_init__(self) -> None:
        check_act(f"MoE {self.at}", self.act)
        need_sizes(f"MoE {self.at}", d=self.d, ff=self.ff, experts=self.experts, top_k=self.top_k)
        if self.clamp is not None and not (len(self.clamp) == 2 and min(self.clamp) > 0):
            raise ValueError(f"MoE {self.at}: clamp is {self.clamp!r}, expected None or two positive numbers (alpha, limit)")
        if self.interleaved and not (self.stacked and self.names[0] == self.names[1]):
            raise ValueError(f"MoE {self.at}: interleaved is set, expected stacked experts with one name for gate and up")
        if self.stacked and (len(self.names) != 3 or any("{}" in n for n in self.names)):
            raise ValueError(f"MoE {self.at}: names is {self.names!r}, expected three (gate, up, down) without {{}}, as stacked is set")
        if not self.stacked and (len(self.names) != 3 or not all("{}" in n for n in self.names)):
            raise ValueError(f"MoE {self.at}: names is {self.names!r}, expected three (gate, up, down) with {{}} for the expert")
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"MoE {self.at}: top_k is {self.top_k}, expected 1..experts={self.experts}")
        if self.fp32_router and self.bias:
            raise ValueError(f"MoE {self.at}: fp32_router is set, expected no bias with it")
        self._check_groups()
        if self.scale_inputs and self.top_k > 1:
            raise ValueError(f"MoE {self.at}: top_k is {self.top_k}, expected 1 with scale_inputs")
        if self.scoring not in SCORING:
            raise ValueError(f"MoE {self.at}: scoring is {self.scoring!r}, expected one of {', '.join(SCORING)}")
        if self.shared_gate and not self.shared:
            raise ValueError(f"MoE {self.at}: shared_gate is {self.shared_gate!r}, but there is no shared expert")

    def _check_groups(self) -> None:
        if self.groups is None:
            return
        if len(self.groups) != 2 or not 1 <= self.groups[1] <= self.groups[0] or self.experts % self.groups[0]:
            raise ValueError(f"MoE {self.at}: groups is {self.groups}, expected (a divisor of experts={self.experts}, as many or fewer)")
        size = self.experts // self.groups[0]
        if size * self.groups[1] < self.top_k or (self.correction and size < 2):
            least = f"top_k={self.top_k} in those chosen, and two in each with a correction"
            raise ValueError(f"MoE {self.at}: groups is {self.groups} of {size} experts, expected {least}")

    def children(self) -> dict[str, Spec | tuple[Spec, ...]]:
        gate, up, down = self.names
        order = Transform.UNGROUP if self.interleaved else None
        out: dict[str, Spec | tuple[Spec, ...]] = {
            "w13": Linear(self.d, consecutive(Part(gate, self.ff), Part(up, self.ff)), "col", self.bias, self.experts, order, self.stacked),
            "w2": Linear(self.ff, (Part(down, self.d),), "row", self.bias, self.experts, stacked=self.stacked),
        }
        if not self.fp32_router:
            out = {"gate": Linear(self.d, (Part(self.router, self.experts),), bias=self.bias), **out}
        if self.shared:
            out["shared"] = self.shared
        if self.shared_gate:
            out["shared_gate_proj"] = Linear(self.d, (Part(self.shared_gate, 1),))
        return out

    def weights(self) -> dict[str, Weight]:
        out = {"router": Weight((Part(self.router, self.experts),), self.d, fp32=True)} if self.fp32_router else {}
        bias = {"router_bias": Weight((Part(self.correction, self.experts),), suffix="", fp32=True)} if self.correction else {}
        return out | bias

    def load(self, m: Any, env: Any) -> None:
        super().load(m, env)
        if (self.bias or self.clamp) and not m.w13.format.expert_extras:
            raise ValueError(f"quant plan: the experts of {m.path} have a bias or a clamp, which the format {m.w13.format.name} lacks")
        if m.w13.format != m.w2.format:
            raise ValueError(f"quant plan: the experts of {m.path} get two formats ({m.w13.format.name}, {m.w2.format.name}), expected one")

    def forward(self, m: Any, x: Tensor | Normed, b: Batch) -> Tensor:
        h = x.tensor() if isinstance(x, Normed) else x
        bias = m.router_bias if self.correction else None
        groups, top_groups = self.groups or (1, 1)
        logits = F.linear(h.float(), m.router) if self.fp32_router else m.gate(h)
        weights, ids = ops.route_experts(logits, self.top_k, self.scoring, renormalize=self.renormalize, bias=bias, scale=self.scale,
                                         groups=groups, top_groups=top_groups)  # fmt: skip
        x = h
        if self.scale_inputs:
            x, weights = h * weights.to(h.dtype), torch.ones_like(weights)
        extras: dict[str, Any] = {"clamp": self.clamp} if self.clamp else {}
        if self.bias:
            extras["w13_bias"] = m.w13.bias
            if m.rank == 0:  # the ranks' shares are summed
                extras["w2_bias"] = m.w2.bias
        y = m.w13.format.experts(m.w13, m.w2, x, ids, weights, self.act, **extras)
        if self.shared:
            s = m.shared(h, b)
            y = y + (s * torch.sigmoid(m.shared_gate_proj(h)) if self.shared_gate else s)
        return y
