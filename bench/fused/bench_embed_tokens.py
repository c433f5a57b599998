"""embed_tokens against torch: T random rows of the table in, T rows out, so bytes = 2 * T * N * 2 + 4 * T."""

from __future__ import annotations

import torch
import torch.nn.functional as F_

from bench import Case, Goal, compiled
from bench.shapes import Shapes
from pyllm.ops.fused import embed_tokens

Set = tuple[torch.Tensor, torch.Tensor]


def make(T: int, V: int, N: int, n: int) -> list[Set]:
    weight = torch.randn(V, N, device="cuda", dtype=torch.bfloat16)
    return [(torch.randint(V, (T,), device="cuda", dtype=torch.int32), weight) for _ in range(n)]


def plain(s: Set) -> torch.Tensor:
    return F_.embedding(s[0], s[1])


def case(T: int, V: int, N: int) -> Case:
    return Case(
        name=f"T={T} V={V} N={N} bf16",
        dtype="bf16",
        bytes=2 * T * N * 2 + 4 * T,
        make=lambda n: make(T, V, N, n),
        ours=lambda s: embed_tokens(s[0], s[1]),
        baselines={"torch": plain, "torch.compile": compiled(plain)},
        goal=Goal(us=2.0) if T == 1 and N <= 8192 else Goal(ratio={"torch": 1.0}) if T >= 8192 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(T, shapes.V, shapes.N) for T in shapes.tokens]
