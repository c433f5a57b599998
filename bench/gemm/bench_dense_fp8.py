"""linear_fp8 against cuBLASLt and CUTLASS: scales per row and column, and per block. Bytes: x, the weight, the result, scales once."""

from __future__ import annotations

from typing import Any

import torch

from bench import Case, Goal
from bench.gemm.products import products, rows
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.dense import linear_fp8
from pyllm.ops.fused import act_mul_fp8
from pyllm.ops.norm import quantize_fp8

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
FEW_ROWS = 64
FAST = {(28672, 4096)}
"""Where the best peer reads the weight of few rows at 3.4 TB/s and more."""


def cutlass(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=BF16, device=x.device)
    vllm.call("cutlass_scaled_mm", out=out, a=x, b=weight.t(), a_scales=x_scale, b_scales=weight_scale, bias=None)
    return out


def cublas(x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    return torch._scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype=BF16, use_fast_accum=True)


def operands(M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(M, K, device="cuda").to(FP8), torch.randn(N, K, device="cuda").to(FP8)


def case_rows(M: int, N: int, K: int) -> Case:
    """Up to 64 rows the stream of the weight counts: the ceiling is a copy, and the goal what the best peer leaves of it."""
    few = M <= FEW_ROWS
    least = 1.0 if not few else 1.05 if (N, K) in FAST else 1.2

    def make(n: int) -> list[Any]:
        one = torch.ones((), device="cuda")
        return [(*operands(M, N, K), torch.rand(M, 1, device="cuda"), torch.rand(N, 1, device="cuda"), one) for _ in range(n)]

    return Case(
        name=f"M={M} N={N} K={K} rows",
        dtype="fp8",
        bytes=M * K + N * K + 2 * M * N + 4 * (M + N),
        flops=2 * M * N * K,
        matrix=None if few else "fp8",
        make=make,
        ours=lambda s: linear_fp8(s[0], s[1], s[2].view(-1), s[3].view(-1)),
        baselines={
            "cublas tensor": lambda s: cublas(s[0], s[1], s[4], s[4]),
            "cublas rows": lambda s: cublas(s[0], s[1], s[2], s[3].t()),
            "vllm": lambda s: cutlass(*s[:4]),
        },
        goal=Goal(ratio={"cublas tensor": least, "cublas rows": least, "vllm": least}),
    )


def case_gated(M: int, N: int, K: int) -> Case:
    """The gate in the epilogue against an op of its own behind the product, both with e4m3 rows at the end."""

    def separate(s: Any) -> Any:
        return act_mul_fp8(linear_fp8(s[0], s[1], s[2], s[3]), "silu")

    return Case(
        name=f"M={M} N={N} K={K} rows, silu * up to fp8",
        dtype="fp8",
        bytes=M * K + N * K + M * N + M * N // 2 + 4 * (2 * M + N),
        flops=2 * M * N * K,
        matrix="fp8",
        make=lambda n: [(*operands(M, N, K), torch.rand(M, device="cuda"), torch.rand(N, device="cuda")) for _ in range(n)],
        ours=lambda s: quantize_fp8(linear_fp8(*s, act="silu", gated=True), "token"),
        baselines={"separate": separate},
        goal=Goal(ratio={"separate": 1.03}),
    )


def case_blocks(M: int, N: int, K: int) -> Case:
    few = M <= FEW_ROWS

    def make(n: int) -> list[Any]:
        sets = []
        for _ in range(n):
            x_scale, w_scale = torch.rand(M, K // 128, device="cuda"), torch.rand(N // 128, K // 128, device="cuda")
            rows = torch.rand(M, device="cuda"), torch.rand(N, device="cuda")
            # The peer reads the scales of x column by column, those of the weight as a transposed matrix.
            sets.append((*operands(M, N, K), x_scale, w_scale, x_scale.t().contiguous().t(), w_scale.t().contiguous(), *rows))
        return sets

    return Case(
        name=f"M={M} N={N} K={K} blocks",
        dtype="fp8",
        bytes=M * K + N * K + 2 * M * N + 4 * (M * K // 128 + N * K // 128**2),
        flops=2 * M * N * K,
        matrix=None if few else "fp8",
        make=make,
        ours=lambda s: linear_fp8(*s[:4]),
        baselines={
            "vllm": lambda s: cutlass(s[0], s[1], s[4], s[5]),
            "rows": lambda s: linear_fp8(s[0], s[1], s[6], s[7]),
        },
        goal=Goal(ratio={"vllm": 1.0} if few else {"vllm": 1.0, "rows": 0.95}),
    )


def cases(shapes: Shapes) -> list[Case]:
    found = products(shapes)
    blocks = [(N, K) for N, K in found if N % 128 == 0 and K % 128 == 0 and N * K >= 1 << 24]
    few = [case_rows(M, N, K) for M in (32, FEW_ROWS) for N, K in found] if shapes.name == "default" else []
    gated = [case_gated(M, *found[2]) for M in rows(shapes) if M >= 1024]
    by_blocks = (1, FEW_ROWS, 4096) if shapes.name == "default" else (4096,)
    many = [case_rows(M, N, K) for M in rows(shapes) for N, K in found]
    return [*few, *many, *gated, *(case_blocks(M, N, K) for M in by_blocks for N, K in blocks)]
