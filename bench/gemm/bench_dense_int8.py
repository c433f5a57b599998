"""linear_int8 against vLLM's CUTLASS with the same scales, and against cuBLAS's product without scales (int32 results)."""

from __future__ import annotations

from typing import Any

import torch

from bench import Case, Goal
from bench.gemm.bench_dense_fp8 import cutlass
from bench.gemm.products import products
from bench.shapes import Shapes
from pyllm.ops.dense import linear_int8


def case(M: int, N: int, K: int) -> Case:
    def make(n: int) -> list[Any]:
        draw = lambda rows: torch.randint(-127, 128, (rows, K), dtype=torch.int8, device="cuda")  # noqa: E731
        return [(draw(M), draw(N), torch.rand(M, 1, device="cuda"), torch.rand(N, 1, device="cuda")) for _ in range(n)]

    return Case(
        name=f"M={M} N={N} K={K} int8",
        dtype="int8",
        bytes=M * K + N * K + 2 * M * N + 4 * (M + N),
        flops=2 * M * N * K,
        matrix="fp8",
        make=make,
        ours=lambda s: linear_int8(s[0], s[1], s[2].view(-1), s[3].view(-1)),
        baselines={"torch int32": lambda s: torch._int_mm(s[0], s[1].t()), "vllm": lambda s: cutlass(*s)},
        goal=Goal(ratio={"vllm": 1.0}),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(1024, N, K) for N, K in products(shapes)[:4]]
