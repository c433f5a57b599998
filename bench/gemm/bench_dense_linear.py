"""dense_linear against cuBLAS: bf16 products of prefill. Bytes: x, the weight and the result once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench import Case, Goal
from bench.gemm.products import products, rows
from bench.shapes import Shapes
from pyllm.ops.dense import dense_linear


def case(M: int, N: int, K: int) -> Case:
    def make(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        one = {"device": "cuda", "dtype": torch.bfloat16}
        return [(torch.randn(M, K, **one), torch.randn(N, K, **one)) for _ in range(n)]

    return Case(
        name=f"M={M} N={N} K={K} bf16",
        dtype="bf16",
        bytes=2 * (M * K + N * K + M * N),
        flops=2 * M * N * K,
        matrix="bf16",
        make=make,
        ours=lambda s: dense_linear(*s),
        baselines={"torch": lambda s: F.linear(*s)},
        goal=Goal(ratio={"torch": 1.0}),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(M, N, K) for M in rows(shapes) for N, K in products(shapes)]
