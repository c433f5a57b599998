"""variant_attention against torch's flex_attention, compiled, and against the same kernel without a variant: ALiBi, a soft cap written by
hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench import Case, compiled
from bench.shapes import Shapes
from pyllm.jit import AttentionVariant, Param
from pyllm.ops import simple_attention, variant_attention

BF16 = torch.bfloat16


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def alibi(H: int) -> tuple[AttentionVariant, Callable[..., Any]]:
    slopes = tuple(2.0 ** (-8 * (h + 1) / H) for h in range(H))
    there = torch.tensor(slopes, device="cuda")
    variant = AttentionVariant("alibi", "s - slopes[h] * (q_pos - k_pos)", params=(Param("slopes", slopes),))
    return variant, lambda s, b, h, q, k: s - there[h] * (q - k)


def capped(H: int) -> tuple[AttentionVariant, Callable[..., Any]]:
    variant = AttentionVariant("capped", "cap * tanhf(s / cap)", params=(Param("cap", 30.0),))
    return variant, lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0)


def score_case(L: int, H: int, K: int, D: int, pick: Callable[[int], tuple[AttentionVariant, Callable[..., Any]]]) -> Case:
    """One sequence of L tokens, causal."""

    def make(n: int) -> list[Any]:
        starts, (variant, change) = torch.tensor([0, L], dtype=torch.int32, device="cuda"), pick(H)
        block = create_block_mask(causal, 1, 1, L, L, device="cuda")
        return [
            (starts, *(torch.randn(L, n_heads, D, device="cuda", dtype=BF16) for n_heads in (H, K, K)), variant, change, block)
            for _ in range(n)
        ]

    def ours(s: Any) -> torch.Tensor:
        return variant_attention(s[1], s[2], s[3], s[0], s[4], kv_starts=s[0], scale=D**-0.5)[0]

    def unchanged(s: Any) -> torch.Tensor:
        return simple_attention(s[1], s[2], s[3], s[0], kv_starts=s[0], scale=D**-0.5)[0]

    def flex(s: Any) -> torch.Tensor:
        q, k, v = (t.view(1, L, -1, D).transpose(1, 2) for t in s[1:4])
        return flex_attention(q, k, v, score_mod=s[5], block_mask=s[6], enable_gqa=H != K)

    return Case(
        name=f"L={L} H={H} K={K} D={D} causal {pick.__name__}",
        dtype="bf16",
        bytes=L * (2 * H + 2 * K) * D * 2 + L * H * 4,
        flops=2 * L * (L + 1) * H * D,
        matrix="bf16",
        make=make,
        ours=ours,
        baselines={"flex_attention": compiled(flex), "simple_attention": unchanged},
    )


def cases(shapes: Shapes) -> list[Case]:
    return [score_case(8192, shapes.H, shapes.K, shapes.D, pick) for pick in (alibi, capped)]
