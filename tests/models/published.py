"""The names that published checkpoints have for what transformers keeps fused: one tensor per expert and matrix."""

from __future__ import annotations

import torch

GATED = ("gate_proj", "up_proj", "down_proj")


def split_experts(state: dict[str, torch.Tensor], block: str = "mlp", names: tuple[str, str, str] = GATED) -> dict[str, torch.Tensor]:
    """`mlp.experts.gate_up_proj` `[E, 2F, d]` and `.down_proj` `[E, d, F]` as `{block}.experts.{e}.{gate, up, down}.weight`; a layer that
    has them has its router under `block` too."""
    out = dict(state)
    for fused in [k for k in state if k.endswith("mlp.experts.gate_up_proj")]:
        at = fused.removesuffix("mlp.experts.gate_up_proj")
        both, last = out.pop(fused), out.pop(f"{at}mlp.experts.down_proj")
        out[f"{at}{block}.gate.weight"] = out.pop(f"{at}mlp.gate.weight")
        for e in range(both.shape[0]):
            parts = zip(names, (*both[e].chunk(2), last[e]), strict=True)
            out |= {f"{at}{block}.experts.{e}.{name}.weight": t for name, t in parts}
    return out
