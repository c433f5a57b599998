"""act_mul_fp8 against act_mul and quantize_fp8 in a row, ours and vLLM's: reads 2F values, writes F bytes per row."""

from __future__ import annotations

import torch
import torch.nn.functional as F_

from bench import Case, Goal
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.fused import act_mul, act_mul_fp8
from pyllm.ops.norm import quantize_fp8


def plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.chunk(2, dim=-1)
    y = (F_.silu(gate) * up).float()
    scale = (y.abs().amax(1, keepdim=True) / 448).clamp(min=1e-10)
    return (y / scale).to(torch.float8_e4m3fn), scale


def case(T: int, F: int) -> Case:
    return Case(
        name=f"T={T} F={F} silu bf16",
        dtype="bf16->fp8",
        bytes=T * (4 * F + F + 4),
        flops=8 * T * F,
        make=lambda n: [torch.randn(T, 2 * F, device="cuda", dtype=torch.bfloat16) for _ in range(n)],
        ours=lambda x: act_mul_fp8(x, "silu"),
        baselines={
            "separate": lambda x: quantize_fp8(act_mul(x, "silu"), "token"),
            "torch": plain,
            "vllm": lambda x: vllm.fp8_token(vllm.silu_and_mul(x)),
        },
        goal=Goal(share=0.9, ratio={"separate": 1.3}) if T >= 8192 else Goal(us=2.0, ratio={"separate": 1.2}) if T == 1 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(T, F) for T, F in shapes.grid(shapes.F)]
