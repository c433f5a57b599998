"""Shapes around the edges of the dense GEMM's tiles (rows of 64 and 128, columns of 64 to 256, K in steps of 64 or 128)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.support.compare import assert_same
from tests.support.generate import normal, poison_allocator

BF16, FP16 = torch.bfloat16, torch.float16

SMALL = [(0, 16, 16), (1, 16, 16), (3, 48, 32), (5, 272, 160)]
"""(M, N, K) for CPU and GPU."""

EDGES = [
    *((m, 256, 128) for m in (63, 64, 65, 127, 128, 129, 255, 257)),
    *((200, n, 192) for n in (16, 112, 128, 144, 240, 256, 272)),
    *((130, 272, k) for k in (16, 48, 64, 80, 112, 128, 144, 1040)),
    (256, 1280, 8192),
    (512, 4096, 1024),
    (1000, 3088, 528),
    (2050, 1040, 208),
]
"""(M, N, K) for the GPU: tile +-1, tails in N and K, one wave and several, a K that is cut over SMs."""


def wide(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows of very different size (fp32)."""
    return normal(rows, columns, seed=seed) * torch.logspace(-2, 2, max(rows, 1))[:rows, None]


def check_repeats(call: Callable[[], torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Two runs into poisoned memory have the same bits."""
    poison_allocator(shape, dtype, "cuda")
    first = call()
    poison_allocator(shape, dtype, "cuda")
    assert_same(call(), first, "second run")
    return first


def check_graph(call: Callable[[], torch.Tensor], change: Callable[[], None]) -> None:
    """A replay computes from what the inputs hold then."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    change()
    graph.replay()
    assert_same(captured, call(), "replay")
