"""softcap of logits against torch: reads and writes V values per row, so bytes = 2 * B * V * itemsize."""

from __future__ import annotations

import torch

from bench import Case, Goal, compiled
from bench.shapes import Shapes
from pyllm.ops.fused import softcap

CAP = 30.0
LABELS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x / CAP) * CAP


def case(B: int, V: int, dtype: torch.dtype) -> Case:
    return Case(
        name=f"B={B} V={V} {LABELS[dtype]}",
        dtype=LABELS[dtype],
        bytes=2 * B * V * dtype.itemsize,
        flops=3 * B * V,
        make=lambda n: [torch.randn(B, V, device="cuda", dtype=dtype) for _ in range(n)],
        ours=lambda x: softcap(x, CAP),
        baselines={"torch": plain, "torch.compile": compiled(plain)},
        goal=Goal(share=0.95) if B * V >= 2**24 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(B, shapes.V, dtype) for B in shapes.batches for dtype in LABELS]
