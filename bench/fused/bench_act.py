"""act against torch: reads and writes F values per row, so bytes = 2 * T * F * 2."""

from __future__ import annotations

import torch
import torch.nn.functional as F_

from bench import Case, Goal, compiled
from bench.shapes import Shapes
from pyllm.ops.fused import act

PLAIN = {"silu": F_.silu, "gelu": F_.gelu, "gelu_tanh": lambda x: F_.gelu(x, approximate="tanh"), "relu2": lambda x: F_.relu(x).square()}


def case(T: int, F: int, name: str) -> Case:
    plain = PLAIN[name]
    return Case(
        name=f"T={T} F={F} {name} bf16",
        dtype="bf16",
        bytes=2 * T * F * 2,
        flops=5 * T * F,
        make=lambda n: [torch.randn(T, F, device="cuda", dtype=torch.bfloat16) for _ in range(n)],
        ours=lambda x: act(x, name),
        baselines={"torch": plain, "torch.compile": compiled(plain)},
        goal=Goal(share=0.95) if T >= 8192 else Goal(us=2.0) if T == 1 and F <= 8192 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(T, F, name) for T, F in shapes.grid(shapes.F) for name in (PLAIN if T >= 8192 else ("silu",))]
