"""The products whose epilogue writes what the next one multiplies: e4m3 with a given scale, or sums of squares for the norm between."""

from __future__ import annotations

from typing import Any

import torch

from bench import Case, Goal
from bench.gemm.products import products, rows
from bench.shapes import Shapes
from pyllm.ops.dense import dense_linear, linear_fp8
from pyllm.ops.dense_e4m3 import linear_e4m3
from pyllm.ops.dense_norm import linear_normed, linear_squares
from pyllm.ops.fused import act_mul_fp8
from pyllm.ops.norm import quantize_fp8, rms_norm

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16


def case_gated(M: int, N: int, K: int) -> Case:
    """silu(gate) * up in e4m3 with a given scale, against the product, and the product with its gate, with an op behind them."""

    def make(n: int) -> list[Any]:
        sets = []
        for _ in range(n):
            x, w = torch.randn(M, K, device="cuda").to(FP8), torch.randn(N, K, device="cuda", dtype=BF16).to(FP8)
            sets.append((x, w, torch.rand(M, device="cuda"), torch.rand(N, device="cuda") * 0.02, torch.full((1,), 0.05, device="cuda")))
        return sets

    return Case(
        name=f"M={M} N={N} K={K} silu * up",
        dtype="fp8",
        bytes=M * K + N * K + M * N // 2 + 4 * (M + N),
        flops=2 * M * N * K,
        matrix="fp8",
        make=make,
        ours=lambda s: linear_e4m3(s[0], s[1], s[4], x_scale=s[2], weight_scale=s[3], act="silu", gated=True),
        baselines={
            "gated": lambda s: quantize_fp8(linear_fp8(*s[:4], act="silu", gated=True), "static", s[4]),
            "separate": lambda s: act_mul_fp8(linear_fp8(*s[:4]), "silu", s[4]),
        },
        goal=Goal(ratio={"gated": 1.0, "separate": 1.0}),
    )


def case_norm(M: int, first: tuple[int, int], second: tuple[int, int], gated: bool) -> Case:
    """A product into the residual, RMSNorm and the next product: two kernels against the three that models run."""
    (N1, K1), (N2, K2) = first, second
    out = N2 // 2 if gated else N2
    act: dict[str, Any] = {"act": "silu", "gated": True} if gated else {}

    def make(n: int) -> list[Any]:
        def bf16(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=BF16) * 0.02

        return [(bf16(M, K1), bf16(N1, K1), bf16(M, N1), bf16(N2, K2), torch.ones(N1, device="cuda")) for _ in range(n)]

    def ours(s: Any) -> torch.Tensor:
        y, squares = linear_squares(s[0], s[1], s[2])
        return linear_normed(y, squares, 1e-5, s[3], **act)

    def three(s: Any) -> torch.Tensor:
        return dense_linear(rms_norm(dense_linear(s[0], s[1]), s[4], 1e-5, s[2]), s[3], **act)

    return Case(
        name=f"M={M} {N1}x{K1} + norm + {N2}x{K2}{' silu * up' if gated else ''}",
        dtype="bf16",
        bytes=2 * (M * K1 + N1 * K1 + 3 * M * N1 + N2 * K2 + M * out),
        flops=2 * M * (N1 * K1 + N2 * K2),
        matrix="bf16",
        make=make,
        ours=ours,
        baselines={"three ops": three},
        goal=Goal(ratio={"three ops": 1.0}),
    )


def cases(shapes: Shapes) -> list[Case]:
    qkv, o, up, down = products(shapes)[:4]
    found = [case_gated(M, *up) for M in rows(shapes)]
    return found + [case for M in rows(shapes) for case in (case_norm(M, o, up, True), case_norm(M, down, qkv, False))]
