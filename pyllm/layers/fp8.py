"""The format Fp8: weights in e4m3 with a scale per output channel or per block, inputs quantized as they come or with a given scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyllm import ops
from pyllm.layers.formats import Format, biases_as
from pyllm.layers.fp8_stored import ActScale, Held, StoredE4m3, stored_scale
from pyllm.layers.inputs import quantized
from pyllm.layers.spec import Weight
from pyllm.layers.stored import BLOCK, E4M3
from pyllm.ops import invariant

GATE_ROWS = 1024
"""Rows of x from which the gate is in the epilogue, which halves the memory in between: 1.04x and 1.05x the speed of the product and an op
of its own at 1,024 and 4,096 rows of (28672, 4096), 0.96x at 1,024 of (16384, 2048)."""
WRITE_ROWS, WRITE_TILES = 1024, 128
"""Rows of x, and tiles of 128 x 128, from which a product writes e4m3 for the next one, whose scale is given. With a gate, against the
product and `act_mul_fp8`, 1.15x and 1.12x the speed at 1,024 and 4,096 rows of (28672, 4096), 1.15x and 1.25x of (16384, 2048)."""
GRANULARITIES, ACTIVATIONS = ("channel", "block"), ("token", "static")


@dataclass(frozen=True)
class Fp8(Format):
    """Products in e4m3. Weights are quantized as they are read from a plain checkpoint, or taken as the checkpoint stores them in e4m3.

    granularity: "channel": a scale per output row (a stored scale of a whole tensor is that of all its rows). "block": a scale for each
    128 x 128 block of the weight, and for each 128 columns of each row of x; the format of DeepSeek-V3 and Qwen3 FP8 checkpoints. Experts
    have no such product.
    activation: "token": x with a scale per row, found as it is quantized. "static": x with the one scale that the checkpoint has for it,
    `input_scale`; of the parts of one product the largest. With granularity "channel" alone, and not for experts.
    N and K of the product are multiples of 16. An fp32 model's products are rounded to bf16.
    """

    granularity: str = "channel"
    activation: str = "token"

    op = "linear_fp8"
    quantizes = "quantize_fp8"
    multiple = 16
    experts_op = "fused_experts"
    expert_extras = True

    def __post_init__(self) -> None:
        for field, known in (("granularity", GRANULARITIES), ("activation", ACTIVATIONS)):
            if getattr(self, field) not in known:
                raise ValueError(f"Fp8: {field} is {getattr(self, field)!r}, expected {' or '.join(map(repr, known))}")
        if self.by_blocks and self.static:
            raise ValueError("Fp8: activation is 'static', expected 'token' with granularity 'block'")

    @property
    def by_blocks(self) -> bool:
        return self.granularity == "block"

    @property
    def static(self) -> bool:  # type: ignore[override]
        return self.activation == "static"

    @property
    def name(self) -> str:  # type: ignore[override]
        return "fp8-block" if self.by_blocks else "fp8-static" if self.static else "fp8"

    @property
    def takes_e4m3(self) -> bool:  # type: ignore[override]
        return not self.by_blocks

    @property
    def granule(self) -> int:  # type: ignore[override]
        return 0 if self.by_blocks else 16

    @property
    def no_experts(self) -> str | None:  # type: ignore[override]
        return f"format {self.name} has no MoE path; expected Fp8() or None for experts" if self.by_blocks or self.static else None

    def tensors(self, weight: Weight) -> dict[str, Weight]:
        return {"weight": replace(weight, fp32=True)}

    def reads(self, weight: Weight, held: Held) -> dict[str, Weight]:
        out = self.tensors(weight)
        scale = stored_scale(weight, self.granularity, held)
        if scale is not None:
            out = {"weight": StoredE4m3.of(weight), "weight_scale": scale}
        return out | ({"input_scale": ActScale.of(weight)} if self.static else {})

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if "weight_scale" not in tensors:
            rows = tensors["weight"]  # of a stack of experts: [E, N, K]
            if self.by_blocks:
                weight, scale = quantize_blocks(rows)
            else:
                weight, scale = ops.quantize_fp8(rows.flatten(0, -2), "token")
                weight, scale = weight.view(rows.shape), scale.view(rows.shape[:-1])
            tensors = tensors | {"weight": weight, "weight_scale": scale}
        return tensors

    def given(self, m: Any) -> Tensor | None:
        return m.input_scale if self.static else None

    def matmul(self, m: Any, x: Tensor, bias: Tensor | None, gate: str | None = None) -> Tensor:
        if self.by_blocks:
            return self._multiply(m, *ops.quantize_fp8(x, "group"), bias, x.dtype)
        return self.matmul_e4m3(m, *quantized(x, self.given(m)), bias, x.dtype, gate)

    def gates(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> bool:
        return not self.by_blocks and rows >= GATE_ROWS and n % 16 == 0

    def matmul_e4m3(self, m: Any, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, gate: str | None = None) -> Tensor:
        if gate is not None:
            half = _half(dtype)
            bias = None if bias is None else bias.to(half)
            return ops.linear_fp8(q, m.weight, scale, m.weight_scale, bias, half, act=gate, gated=True).to(dtype)
        return self._multiply(m, q, scale.expand(len(q)).contiguous() if m.invariant else scale, bias, dtype)

    def _multiply(self, m: Any, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        half, linear = _half(dtype), invariant.invariant_linear_fp8 if m.invariant else ops.linear_fp8
        return linear(q, m.weight, scale, m.weight_scale, None if bias is None else bias.to(half), half).to(dtype)

    def writes(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str, gated: bool) -> bool:
        large = rows >= WRITE_ROWS and -(-rows // 128) * -(-n // 128) >= WRITE_TILES
        return not self.by_blocks and large and n % (32 if gated else 16) == 0

    def matmul_to_e4m3(self, m: Any, x: Any, bias: Tensor | None, out_scale: Tensor, act: str, gated: bool) -> Tensor:
        q, scale = x if isinstance(x, tuple) else quantized(x, self.given(m))
        half = bias if bias is None or bias.dtype != torch.float32 else bias.bfloat16()
        return ops.linear_e4m3(q, m.weight, out_scale, half, x_scale=scale, weight_scale=m.weight_scale, act=act, gated=gated)

    def experts(self, w13: Any, w2: Any, x: Tensor, ids: Tensor, weights: Tensor, act: str, **extras: Any) -> Tensor:
        half = _half(x.dtype)
        scales = {"w13_scale": w13.weight_scale, "w2_scale": w2.weight_scale}
        return ops.fused_experts(x.to(half), w13.weight, w2.weight, ids, weights, act, **scales, **biases_as(half, extras)).to(x.dtype)

    def weight_bytes(self, n: int, k: int) -> int:
        return n * k + 4 * (-(-n // BLOCK) * -(-k // BLOCK) if self.by_blocks else n)


def _half(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else dtype


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight fp32 `[N, K]` -> e4m3 `[N, K]` and fp32 `[ceil(N / 128), ceil(K / 128)]`; scale and rounding as in `quantize_fp8`."""
    n, k = weight.shape
    tall, wide = -(-n // BLOCK), -(-k // BLOCK)
    blocks = torch.nn.functional.pad(weight, (0, wide * BLOCK - k, 0, tall * BLOCK - n)).view(tall, BLOCK, wide, BLOCK)
    scale = (blocks.abs().amax((1, 3), keepdim=True) / 448.0).clamp(min=1e-10)
    q = (blocks * (1.0 / scale)).clamp(-448.0, 448.0).to(E4M3)
    return q.view(tall * BLOCK, wide * BLOCK)[:n, :k].contiguous(), scale.view(tall, wide)
