"""advance_rows against the same as element-wise torch ops. 13 words of 4 bytes a row."""

from __future__ import annotations

import torch

from bench import Case, Goal
from bench.shapes import Shapes
from pyllm.ops.rows import advance_rows

PAGE, WIDTH = 64, 32


def separate(sampled, token, position, kv_len, slots, active, table):
    position.add_(active)
    kv_len.add_(active)
    column = (position // PAGE).clamp_max(WIDTH - 1).long()
    slots.copy_(table.gather(1, column[:, None]).squeeze(1) * PAGE + position % PAGE)
    token.copy_(sampled.clamp_min(0))


def case(n: int) -> Case:
    def make(count: int) -> list[list[torch.Tensor]]:
        zeros = lambda *shape: torch.zeros(shape, dtype=torch.int32, device="cuda")  # noqa: E731
        return [[*(zeros(n) for _ in range(6)), zeros(n, WIDTH)] for _ in range(count)]

    return Case(
        name=f"S={n}",
        dtype="int32",
        bytes=13 * 4 * n,
        flops=0,
        make=make,
        ours=lambda s: advance_rows(*s, PAGE),
        baselines={"torch": lambda s: separate(*s)},
        goal=Goal(us=2.0),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(n) for n in shapes.batches]
