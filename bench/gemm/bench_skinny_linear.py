"""skinny_linear against cuBLAS, cuBLASLt and vLLM's CUTLASS: one stream of the weight, so bytes = N * K * item + the rows of x and y.

Weights rotate, so that none of them is in L2 when its turn comes. Goals: 1.25x cuBLAS (bf16) and 1.2x the best peer (FP8) at shapes that
they read well under the memory's rate, and 90 % (85 %) of a copy for weights over 64 MB.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F_

from bench import Case, Goal, compiled
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.skinny import skinny_linear

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
LLAMA_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
LLAMA_70B_TP8 = ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))
SLOW = {(4096, 4096), (3072, 2048), (2048, 2048), (2048, 8192), (1280, 8192), (8192, 1024)}
"""Where cuBLAS reads bf16 under 3.2 TB/s."""
LARGE = 64_000_000


def weights_of(shapes: Shapes) -> tuple[tuple[int, int], ...]:
    if shapes.name == "default":
        return (*LLAMA_8B[:4], *LLAMA_1B, *LLAMA_70B_TP8[:2])
    qkv = (shapes.H + 2 * shapes.K) * shapes.D
    return ((qkv, shapes.N), (shapes.N, shapes.H * shapes.D), (2 * shapes.F, shapes.N), (shapes.N, shapes.F), (shapes.V, shapes.N))


def moved(m: int, n: int, k: int, item: int) -> int:
    return n * k * item + m * k * item + m * n * 2


def dense_case(m: int, n: int, k: int) -> Case:
    large = n * k * 2 > LARGE
    return Case(
        name=f"M={m} N={n} K={k} bf16",
        dtype="bf16",
        bytes=moved(m, n, k, 2),
        flops=2 * m * n * k,
        make=lambda count: [(_normal(m, k), _normal(n, k)) for _ in range(count)],
        ours=lambda s: skinny_linear(s[0], s[1]),
        baselines={"cuBLAS": lambda s: F_.linear(s[0], s[1])},
        goal=Goal(share=0.9 if large else None, ratio={"cuBLAS": 1.25 if (n, k) in SLOW else 1.0}),
    )


def norm_case(m: int, n: int, k: int) -> Case:
    eps = 1e-5

    def plain(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
        gate, up = F_.linear(F_.rms_norm(s[0], (k,), s[2], eps), s[1]).chunk(2, dim=-1)
        return F_.silu(gate) * up

    return Case(
        name=f"M={m} N={n} K={k} bf16 norm + silu * up",
        dtype="bf16",
        bytes=moved(m, n, k, 2) - m * n,
        flops=2 * m * n * k,
        make=lambda count: [(_normal(m, k), _normal(n, k), _normal(k)) for _ in range(count)],
        ours=lambda s: skinny_linear(s[0], s[1], act="silu", gated=True, norm_weight=s[2], eps=eps),
        baselines={
            "torch": plain,
            "torch.compile": compiled(plain),
            "GEMM alone": lambda s: skinny_linear(s[0], s[1]),
        },
        goal=Goal(ratio={"torch.compile": 1.4 if n * k * 2 < LARGE * 1.1 else 1.1}),
    )


def fp8_case(m: int, n: int, k: int) -> Case:
    def make(count: int) -> list[Any]:
        return [
            (_normal(m, k).to(FP8), _normal(n, k).to(FP8), torch.rand(m, device="cuda") + 0.5, torch.rand(n, device="cuda") + 0.5)
            for _ in range(count)
        ]

    def rowwise(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch._scaled_mm(s[0], s[1].t(), s[2][:, None], s[3][None, :], out_dtype=BF16)

    def per_tensor(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch._scaled_mm(s[0], s[1].t(), s[2][0], s[3][0], out_dtype=BF16)

    def cutlass(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out = torch.empty(m, n, dtype=BF16, device="cuda")
        vllm.call("cutlass_scaled_mm", out=out, a=s[0], b=s[1].t(), a_scales=s[2][:, None], b_scales=s[3][:, None], bias=None)
        return out

    large = n * k > LARGE
    return Case(
        name=f"M={m} N={n} K={k} fp8",
        dtype="fp8->bf16",
        bytes=moved(m, n, k, 1),
        flops=2 * m * n * k,
        make=make,
        ours=lambda s: skinny_linear(s[0], s[1], x_scale=s[2], weight_scale=s[3]),
        baselines={"cuBLASLt row-wise": rowwise, "cuBLASLt per-tensor": per_tensor, "vllm": cutlass},
        goal=Goal(share=0.85 if large else None, ratio={"cuBLASLt per-tensor": 1.05 if large else 1.2, "vllm": 1.05 if large else 1.2}),
    )


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def cases(shapes: Shapes) -> list[Case]:
    weights = weights_of(shapes)
    dense = [dense_case(m, n, k) for n, k in weights for m in (1, 4, 16)]
    fp8 = [fp8_case(m, n, k) for n, k in weights for m in (1, 4, 16)]
    gate_up = [(28672, 4096), (16384, 2048)] if shapes.name == "default" else [(2 * shapes.F, shapes.N)]
    return [*dense, *fp8, *(norm_case(m, n, k) for n, k in gate_up for m in (1,))]
