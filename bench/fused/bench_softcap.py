"""softcap of logits against torch: reads and writes V values per row, so bytes = 2 * B * V * itemsize.

V = 50257 (GPT-2) is odd: rows end to end, and rows of a vocabulary padded to 50304, whose outputs start at any element.
"""

from __future__ import annotations

import torch

from bench import Case, Goal, compiled
from bench.shapes import Shapes
from pyllm.ops.fused import softcap

CAP = 30.0
LABELS = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x / CAP) * CAP


def case(B: int, V: int, dtype: torch.dtype, stride: int | None = None) -> Case:
    """stride: of the rows, where they do not lie end to end."""
    stride = stride or V
    return Case(
        name=f"B={B} V={V}{f' of {stride}' if stride != V else ''} {LABELS[dtype]}",
        dtype=LABELS[dtype],
        bytes=2 * B * V * dtype.itemsize,
        flops=3 * B * V,
        make=lambda n: [torch.randn(B, stride, device="cuda", dtype=dtype)[:, :V] for _ in range(n)],
        ours=lambda x: softcap(x, CAP),
        baselines={"torch": plain, "torch.compile": compiled(plain)},
        goal=Goal(share=0.95) if B * V >= 2**23 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    odd = [case(B, 50257, torch.bfloat16, stride) for B in shapes.batches for stride in (None, 50304) if shapes.name == "default"]
    return [case(B, shapes.V, dtype) for B in shapes.batches for dtype in LABELS] + odd
