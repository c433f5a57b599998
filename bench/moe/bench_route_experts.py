"""route_experts against torch and vLLM's kernel. Bytes: the logits once, weights and ids once."""

from __future__ import annotations

from typing import Any

import torch

from bench import Case, Goal
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops import route_experts

ROUTERS = {"qwen3-30b-a3b": (128, 8), "mixtral-8x7b": (8, 2)}
"""E, top_k; softmax, renormalized."""


def by_torch(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids.int()


def by_vllm(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, ...]:
    weights = torch.empty(logits.shape[0], top_k, device=logits.device)
    ids, index = (torch.empty(logits.shape[0], top_k, dtype=torch.int32, device=logits.device) for _ in range(2))
    out = {"topk_weights": weights, "topk_indices": ids, "token_expert_indices": index}
    vllm.call("topk_softmax", namespace="_moe_C", **out, gating_output=logits, renormalize=True, bias=None)
    return weights, ids


def case(model: str, T: int) -> Case:
    E, top_k = ROUTERS[model]

    def make(n: int) -> list[Any]:
        return [torch.randn(T, E, dtype=torch.bfloat16, device="cuda") for _ in range(n)]

    return Case(
        name=f"{model} T={T}",
        dtype="bf16",
        bytes=T * (2 * E + 8 * top_k),
        make=make,
        ours=lambda s: route_experts(s, top_k),
        baselines={"torch": lambda s: by_torch(s, top_k), "vllm": lambda s: by_vllm(s, top_k)},
        goal=Goal(ratio={"torch": 1.0, "vllm": 1.0}),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(model, T) for model in ROUTERS for T in shapes.tokens]
