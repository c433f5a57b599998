"""Shape tables: the sizes of published model configs, named after the models, and the `default` sizes of the goals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shapes:
    """Sizes in the letters of the design, and the token and sequence counts to measure them at."""

    name: str
    N: int  # hidden size
    F: int  # ffn size
    H: int  # query heads
    K: int  # KV heads
    D: int  # head dim
    V: int  # vocabulary
    tokens: tuple[int, ...] = (1, 256, 8192)
    batches: tuple[int, ...] = (1, 256)
    extra: tuple[tuple[int, int], ...] = ()  # (T, width) pairs measured besides tokens x width

    def grid(self, width: int) -> list[tuple[int, int]]:
        """The (T, width) pairs of a row-wise op."""
        pairs = [(T, width) for T in self.tokens]
        return pairs + [pair for pair in self.extra if pair not in pairs]


SHAPES = {
    s.name: s
    for s in (
        # 8192 x 4096 and one row of 8192 are the sizes at which the goals of the row-wise ops are stated.
        Shapes("default", N=4096, F=4096, H=32, K=8, D=128, V=128256, extra=((1, 8192),)),
        Shapes("smollm2", N=576, F=1536, H=9, K=3, D=64, V=49152),
        Shapes("llama3.2-1b", N=2048, F=8192, H=32, K=8, D=64, V=128256),
        Shapes("llama3-8b", N=4096, F=14336, H=32, K=8, D=128, V=128256),
        Shapes("llama3-70b", N=8192, F=28672, H=64, K=8, D=128, V=128256),
        Shapes("qwen3-8b", N=4096, F=12288, H=32, K=8, D=128, V=151936),
        Shapes("gemma2-9b", N=3584, F=14336, H=16, K=8, D=256, V=256000),
    )
}

PUBLISHED = ("default", "smollm2", "llama3-8b")
"""The tables whose records the repository keeps; one run over more would take an hour of GPU time, most of it torch.compile."""


def shapes_named(name: str) -> Shapes:
    """The table of that name; `ValueError` lists the names there are."""
    if name not in SHAPES:
        raise ValueError(f"bench: --shapes is {name!r}, expected one of {', '.join(SHAPES)}")
    return SHAPES[name]
