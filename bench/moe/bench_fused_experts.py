"""fused_experts at the experts of Qwen3-30B-A3B and Mixtral 8x7B: decode (each chosen expert's weights are read once) and prefill.

Weights are larger than the L2 together, and the sets share them: each set has its own tokens and its own random routing. bytes counts the
weights of the experts that the first sets touch on average, x and the result; the peers stand in bench/moe/peers.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from bench import Case, Goal
from bench.moe import peers
from bench.shapes import Shapes
from pyllm.ops import fused_experts, quantize_fp8

BF16 = torch.bfloat16
MODELS = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336)}
"""E, top_k, N, F."""
TOKENS = (1, 8, 64, 256, 4096)
COUNTED = 4  # sets whose routing `bytes` averages
MANY = 256  # tokens from which the matrix rate is the ceiling at these shapes


def routing(T: int, E: int, top_k: int, index: int) -> torch.Tensor:
    scores = torch.rand(T, E, generator=torch.Generator().manual_seed(index))
    return scores.topk(top_k, dim=1).indices.int()


def touched(T: int, E: int, top_k: int) -> float:
    return sum(routing(T, E, top_k, i).unique().numel() for i in range(COUNTED)) / COUNTED


def expert_weights(E: int, N: int, F: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.empty(E, *shape, dtype=BF16, device="cuda").normal_(0, 0.02) for shape in ((2 * F, N), (N, F)))  # type: ignore[return-value]


def inputs(n: int, T: int, E: int, top_k: int, N: int) -> list[tuple[torch.Tensor, ...]]:
    """x, ids, weights of each set."""
    tokens = [torch.randn(T, N, dtype=BF16, device="cuda") for _ in range(n)]
    return [(x, routing(T, E, top_k, i).cuda(), torch.rand(T, top_k, device="cuda")) for i, x in enumerate(tokens)]


def make_bf16(n: int, *, T: int, E: int, top_k: int, N: int, F: int) -> list[Any]:
    w13, w2 = expert_weights(E, N, F)
    return [(x, w13, w2, ids, share) for x, ids, share in inputs(n, T, E, top_k, N)]


def make_fp8(n: int, *, T: int, E: int, top_k: int, N: int, F: int) -> list[Any]:
    found = []
    for w in expert_weights(E, N, F):
        q, scale = quantize_fp8(w.view(-1, w.shape[2]), "token")
        found.append((q.view(w.shape), scale.view(w.shape[:2])))
    (w13, s13), (w2, s2) = found
    return [(x, w13, w2, ids, share, s13, s2) for x, ids, share in inputs(n, T, E, top_k, N)]


def case(model: str, experts: tuple[int, int, int, int], T: int, fp8: bool) -> Case:
    E, top_k, N, F = experts
    sizes = {"T": T, "E": E, "top_k": top_k, "N": N, "F": F}
    weight = 3 * N * F * (1 if fp8 else 2) + (4 * (2 * F + N) if fp8 else 0)
    return Case(
        name=f"{model} T={T} {'fp8' if fp8 else 'bf16'}",
        dtype="fp8" if fp8 else "bf16",
        bytes=int(touched(T, E, top_k) * weight) + 2 * T * N * 2,
        flops=6 * T * top_k * N * F,
        matrix=("fp8" if fp8 else "bf16") if T > MANY else None,
        make=partial(make_fp8 if fp8 else make_bf16, **sizes),
        ours=lambda s: fused_experts(*s[:5], w13_scale=s[5], w2_scale=s[6]) if fp8 else fused_experts(*s),
        baselines={"vllm": lambda s: peers.cutlass(*s)}
        if fp8
        else {"triton": lambda s: peers.triton(*s), "torch grouped_mm": lambda s: peers.grouped_mm(*s)},
        goal=Goal(ratio={"vllm": 1.0}) if fp8 else Goal(ratio={"triton": 1.0, "torch grouped_mm": 1.0}),
    )


def cases(shapes: Shapes) -> list[Case]:
    if shapes.name != "default":  # eight of the table's MLPs as experts
        return [case("8 experts", (8, 2, shapes.N, shapes.F), 64, False)]
    return [case(model, experts, T, fp8) for model, experts in MODELS.items() for T in TOKENS for fp8 in (False, True)]
