"""act_mul against torch and vLLM: reads 2F, writes F values per row, so bytes = 3 * T * F * 2."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F_

from bench import Case, Goal, compiled
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.fused import act_mul

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F_.silu,
    "gelu": F_.gelu,
    "gelu_tanh": lambda x: F_.gelu(x, approximate="tanh"),
}
PEERS = {"silu": vllm.silu_and_mul, "gelu": vllm.gelu_and_mul, "gelu_tanh": vllm.gelu_tanh_and_mul}


def case(T: int, F: int, name: str) -> Case:
    def plain(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return ACTIVATIONS[name](gate) * up

    return Case(
        name=f"T={T} F={F} {name} bf16",
        dtype="bf16",
        bytes=3 * T * F * 2,
        flops=6 * T * F,
        make=lambda n: [torch.randn(T, 2 * F, device="cuda", dtype=torch.bfloat16) for _ in range(n)],
        ours=lambda x: act_mul(x, name),
        baselines={"torch": plain, "torch.compile": compiled(plain), "vllm": PEERS[name]},
        goal=Goal(share=0.95, ratio={"vllm": 1.0}) if T >= 8192 else Goal(us=2.0) if T == 1 and F <= 14336 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(T, F, name) for T, F in shapes.grid(shapes.F) for name in (ACTIVATIONS if T >= 8192 else ("silu",))]
