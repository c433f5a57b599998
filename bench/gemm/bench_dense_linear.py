"""dense_linear against cuBLAS: bf16 products of prefill. Bytes: x, the weight and the result once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench import Case, Goal, compiled
from bench.gemm.products import products, rows
from bench.shapes import Shapes
from pyllm.ops.dense import dense_linear
from pyllm.ops.fused import act_mul
from pyllm.ops.norm import rms_norm

FEW_ROWS = 64
SLOW = {(6144, 4096), (4096, 4096), (2048, 8192), (1280, 8192)}
"""Where cuBLAS reads the weight of few rows under 3.2 TB/s."""


def case(M: int, N: int, K: int) -> Case:
    """Up to 64 rows the stream of the weight counts: the ceiling is a copy."""
    few = M <= FEW_ROWS

    def make(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        one = {"device": "cuda", "dtype": torch.bfloat16}
        return [(torch.randn(M, K, **one), torch.randn(N, K, **one)) for _ in range(n)]

    return Case(
        name=f"M={M} N={N} K={K} bf16",
        dtype="bf16",
        bytes=2 * (M * K + N * K + M * N),
        flops=2 * M * N * K,
        matrix=None if few else "bf16",
        make=make,
        ours=lambda s: dense_linear(*s),
        baselines={"torch": lambda s: F.linear(*s)},
        goal=Goal(ratio={"torch": 1.25 if few and (N, K) in SLOW else 1.0}),
    )


def case_gated(M: int, N: int, K: int) -> Case:
    """norm, product and gated activation of a prefill: the gate in the epilogue against three ops."""
    eps = 1e-5

    def make(n: int) -> list[tuple[torch.Tensor, ...]]:
        one = {"device": "cuda", "dtype": torch.bfloat16}
        return [(torch.randn(M, K, **one), torch.randn(N, K, **one), torch.rand(K, device="cuda")) for _ in range(n)]

    def plain(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
        gate, up = F.linear(F.rms_norm(s[0], (K,), s[2].to(s[0].dtype), eps), s[1]).chunk(2, dim=-1)
        return F.silu(gate) * up

    return Case(
        name=f"M={M} N={N} K={K} bf16 norm, silu * up",
        dtype="bf16",
        bytes=2 * (3 * M * K + N * K + M * N // 2),
        flops=2 * M * N * K,
        matrix="bf16",
        make=make,
        ours=lambda s: dense_linear(rms_norm(s[0], s[2], eps), s[1], act="silu", gated=True),
        baselines={
            "separate": lambda s: act_mul(dense_linear(rms_norm(s[0], s[2], eps), s[1]), "silu"),
            "torch": plain,
            "torch.compile": compiled(plain),
        },
        goal=Goal(ratio={"separate": 1.03, "torch.compile": 1.1}),
    )


def cases(shapes: Shapes) -> list[Case]:
    found = products(shapes)
    gated = [case_gated(M, *found[2]) for M in rows(shapes) if M >= 1024]
    few = [case(M, N, K) for M in (32, FEW_ROWS) for N, K in found] if shapes.name == "default" else []
    return [*few, *(case(M, N, K) for M in rows(shapes) for N, K in found), *gated]
