"""The formulas of the fused ops once more, in fp64 and as written in the papers, and what the tests of row-wise ops share on the GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tests.support.compare import EPS, assert_same
from tests.support.generate import poison_allocator

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
FLUSH = 2.0**-119
"""Results of the activations below this may be zero (hardware reciprocal; fp32 references flush alike)."""


def activation64(x: torch.Tensor, act: str) -> torch.Tensor:
    x = x.double()
    if act == "silu":
        return x / (1 + torch.exp(-x))
    if act == "gelu":
        return x * 0.5 * torch.special.erfc(-x / math.sqrt(2))
    if act == "gelu_tanh":  # x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)), which keeps the tail of negative x
        return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x.clamp(min=0) ** 2


def activation_error(x: torch.Tensor, act: str, dtype: torch.dtype) -> torch.Tensor:
    """Relative error of the activation itself, before the output rounding.

    bf16, fp16: 2^-14, the documented bound. fp32: some 16 roundings u, and the exponent y of exp(-y) carries 4 roundings, each of which
    changes the result by |y| u: y = x (silu), x^2 / 2 (gelu), 1.6 x + 0.0714 x^3 (gelu_tanh).
    """
    if dtype != torch.float32:
        return torch.full_like(x, 2.0**-14, dtype=torch.float64)
    a = x.double().abs()
    y = {"silu": a, "gelu": a**2 / 2, "gelu_tanh": 1.6 * a + 0.0714 * a**3, "relu2": 0 * a}[act]
    return EPS[torch.float32] * (16 + 4 * y)


def half_step(dtype: torch.dtype) -> float:
    """Half the distance of subnormals: the absolute part of one rounding."""
    return torch.finfo(dtype).smallest_normal * EPS[dtype]


def on_gpu(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """run(x) into memory that was NaN before; twice with the same bits; each row alone gives the bits it has in the batch."""
    shape = run(x).shape
    poison_allocator(shape, x.dtype, x.device)
    out = run(x)
    assert_same(run(x), out, "second run")
    for t in {0, x.shape[0] // 2, x.shape[0] - 1} if x.shape[0] else ():
        assert_same(run(x[t : t + 1]), out[t : t + 1], f"row {t} alone")
    return out


def check_graph(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, changed: torch.Tensor) -> None:
    """Captured once with x, replayed with x changed: the result is that of the changed input."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    want = run(changed)
    x.copy_(changed)
    out.fill_(float("nan"))
    graph.replay()
    assert_same(out, want, "replayed graph")


def check_chain(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, length: int = 20) -> None:
    """A chain of dependent launches in one graph gives the bits of the same launches one by one: each waits for its predecessor."""
    want = [x]
    for _ in range(length):
        want.append(run(want[-1]))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [x]
        for _ in range(length):
            got.append(run(got[-1]))
    for y in got[1:]:
        y.fill_(float("nan"))
    graph.replay()
    for i in range(1, length + 1):
        assert_same(got[i], want[i], f"link {i} of the chain")


def far_rows(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Two rows that lie more than 2^31 elements apart, random."""
    stride = 2**31 + 64
    far = torch.empty(stride + n, dtype=dtype, device="cuda").as_strided((2, n), (stride, 1))
    return far.copy_(torch.randn(2, n, device="cuda"))
