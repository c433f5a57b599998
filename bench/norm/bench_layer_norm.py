"""layer_norm against torch: plain and with residual add; bytes = x in, y out, residual in and out, weight and bias once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F_

from bench import Case, Goal, compiled
from bench.shapes import Shapes
from pyllm.ops.norm import layer_norm

EPS = 1e-5


def plain(s: Any) -> torch.Tensor:
    return F_.layer_norm(s[0], s[1].shape, s[1], s[2], EPS)


def plain_add(s: Any) -> Any:
    x, weight, bias, residual = s
    residual.add_(x)
    return F_.layer_norm(residual, weight.shape, weight, bias, EPS), residual


def make(T: int, N: int, n: int) -> list[Any]:
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weight, bias = torch.randn(N, **options), torch.randn(N, **options)
    return [(torch.randn(T, N, **options), weight, bias, torch.randn(T, N, **options)) for _ in range(n)]


def case(T: int, N: int, add: bool) -> Case:
    fn = plain_add if add else plain
    return Case(
        name=f"T={T} N={N}{' add' if add else ''} bf16",
        dtype="bf16",
        bytes=T * N * (8 if add else 4) + 4 * N,
        flops=T * N * (7 + add),
        make=lambda n: make(T, N, n),
        ours=lambda s: layer_norm(s[0], s[1], s[2], EPS, residual=s[3] if add else None),
        baselines={"torch": fn, "torch.compile": compiled(fn)},
        goal=Goal(share=0.95) if T >= 8192 else Goal(us=2.0) if T == 1 and N <= 8192 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(T, N, add) for add in (False, True) for T, N in shapes.grid(shapes.N)]
