"""The products of a model's layer, and those at which the goals of the GEMMs are stated."""

from __future__ import annotations

from bench.shapes import Shapes

GOALS = (
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),  # Llama 8B
    *((16384, 2048), (2048, 8192)),  # Llama 1B
    *((1280, 8192), (7168, 8192)),  # Llama 70B, one of 8 ranks
)
"""(N, K) of weights."""


def rows(shapes: Shapes) -> tuple[int, ...]:
    """M of prefill; other tables than the default take one."""
    return (256, 1024, 4096) if shapes.name == "default" else (1024,)


def products(shapes: Shapes) -> tuple[tuple[int, int], ...]:
    """(N, K): qkv, o, gate and up, down; for the default table those of the goals."""
    if shapes.name == "default":
        return GOALS
    qkv, inner = (shapes.H + 2 * shapes.K) * shapes.D, shapes.H * shapes.D
    return tuple(dict.fromkeys(((qkv, shapes.N), (shapes.N, inner), (2 * shapes.F, shapes.N), (shapes.N, shapes.F))))
