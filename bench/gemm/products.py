"""The products of a model's layer, and those at which the goals of the GEMMs are stated."""

from __future__ import annotations

from bench.shapes import Shapes

LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LLAMA_1B = ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
LLAMA_70B_TP8 = ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))
GOALS = (*LLAMA_8B, *LLAMA_1B, *LLAMA_70B_TP8)
"""(N, K) of weights."""
ROWS = (256, 1024, 4096, 8192)
"""M of prefill."""


def products(shapes: Shapes) -> tuple[tuple[int, int], ...]:
    """(N, K): qkv, o, gate and up, down; for the default table those of the goals."""
    if shapes.name == "default":
        return GOALS
    qkv, inner = (shapes.H + 2 * shapes.K) * shapes.D, shapes.H * shapes.D
    return tuple(dict.fromkeys(((qkv, shapes.N), (shapes.N, inner), (2 * shapes.F, shapes.N), (shapes.N, shapes.F))))
