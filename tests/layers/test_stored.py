"""Tensors stored quantized, against loops over bytes and blocks; what of them does not fit is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm.layers import Linear, MoE, Part, bind
from pyllm.layers.stored import expand_fp8, expand_mxfp4

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def mxfp4(experts: int, rows: int, inputs: int, low: int = 100, high: int = 150) -> tuple[Tensor, Tensor]:
    blocks = torch.randint(0, 256, (experts, rows, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(low, high, (experts, rows, inputs // 32), dtype=torch.uint8)


def test_mxfp4_against_a_loop_over_its_bytes() -> None:
    blocks, scales = mxfp4(2, 3, 64)
    blocks[0, 0, 0] = torch.arange(16) * 17  # every code in both halves
    got = expand_mxfp4("b", "s", blocks, scales)
    assert (got.shape, got.dtype) == ((2, 64, 3), torch.bfloat16)
    for e in range(2):
        for row in range(3):
            for i in range(64):
                byte = int(blocks[e, row, i // 32, i % 32 // 2])
                code = byte >> 4 if i % 2 else byte & 15
                value = math.ldexp(E2M1[code & 7], int(scales[e, row, i // 32]) - 127) * (-1 if code & 8 else 1)
                assert got[e, i, row].item() == value  # a power of two times at most three bits: bf16 has it exactly


def test_mxfp4_of_the_smallest_scales_is_exact_and_of_the_largest_infinite() -> None:
    blocks, scales = torch.full((1, 1, 2, 16), 0x71, dtype=torch.uint8), torch.tensor([[[0, 254]]], dtype=torch.uint8)
    got = expand_mxfp4("b", "s", blocks, scales)[0, :, 0]
    assert got[:2].tolist() == [math.ldexp(0.5, -127), math.ldexp(6, -127)]
    assert got[32:34].tolist() == [math.ldexp(0.5, 127), math.inf]


def test_experts_from_blocks_equal_experts_from_plain_tensors() -> None:
    moe = MoE("mlp", 64, 32, 3, 2, stacked=True, names=("gate_up", "gate_up", "down"), interleaved=True)
    plain = {"mlp.gate.weight": torch.randn(3, 64)}
    packed = dict(plain)
    for name, rows, inputs in (("gate_up", 64, 64), ("down", 64, 32)):
        blocks, scales = mxfp4(3, rows, inputs, 120, 130)
        packed |= {f"mlp.{name}_blocks": blocks, f"mlp.{name}_scales": scales}
        plain[f"mlp.{name}"] = expand_mxfp4("b", "s", blocks, scales)
    seen: list[str] = []
    x, want, got = torch.randn(5, 64), bind(moe, plain), bind(moe, packed, progress=seen.append)
    assert torch.equal(got(x, None), want(x, None))
    assert sorted(seen) == sorted(packed)
    two = [bind(moe, packed, rank=r, tp=2)(x, None) for r in range(2)]
    torch.testing.assert_close(two[0] + two[1], got(x, None), rtol=1e-4, atol=1e-4 * got(x, None).abs().max().item())


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 5)])
def test_e4m3_blocks_against_a_loop(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)) + 0.5
    got = expand_fp8("w", "s", weight, scales)
    for n in range(0, shape[0], 7):
        for k in range(0, shape[1], 3):
            assert got[n, k].item() == (weight[n, k].float() * scales[n // 128, k // 128]).item()
    linear = Linear(shape[1], (Part("w", shape[0]),))
    assert torch.equal(bind(linear, {"w.weight": weight, "w.weight_scale_inv": scales}).weight, got)


def packed(*shape: int, scales: tuple[int, ...] = (2, 4, 1), value: int = 0, dtype: torch.dtype = torch.uint8) -> dict[str, Tensor]:
    return {"x_blocks": torch.zeros(shape, dtype=dtype), "x_scales": torch.full(scales, value, dtype=torch.uint8)}


BAD: list[tuple[dict[str, Tensor], str]] = [
    ({"x_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8)}, "has 'x_blocks' but no tensor 'x_scales'"),
    (packed(2, 4, 1, 8), r"'x_blocks' is torch.uint8 \(2, 4, 1, 8\)"),
    (packed(2, 4, 1, 16, dtype=torch.float32), "'x_blocks' is torch.float32"),
    (packed(2, 4, 1, 16, scales=(2, 4)), r"'x_scales' is torch.uint8 \(2, 4\), expected"),
    (packed(2, 4, 1, 16, value=255), "'x_scales' holds 255"),
    (packed(2, 8, 1, 16, scales=(2, 8, 1)), r"shape \(2, 32, 8\), the declaration expects"),
]


@pytest.mark.parametrize(("state", "message"), BAD)
def test_bad_blocks_are_named(state: dict[str, Tensor], message: str) -> None:
    linear = Linear(32, (Part("x", 4),), experts=2, stacked=True)
    with pytest.raises(ValueError, match=f"checkpoint.*{message}"):
        bind(linear, state)


E4M3 = torch.zeros(4, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("weight", "scales", "message"),
    [(torch.zeros(4, 4), torch.ones(1, 1), "'w.weight' is torch.float32"),
     (E4M3, torch.ones(2, 1), r"'w.weight_scale_inv' is torch.float32 \(2, 1\), expected floats \(1, 1\)"),
     (E4M3, torch.tensor([[float("inf")]]), "'w.weight_scale_inv' holds a scale that is no finite number"),
     ((E4M3.float() + float("nan")).to(E4M3.dtype), torch.ones(1, 1), "'w.weight' holds 0x7f or 0xff, which are no numbers"),
     ((E4M3.float() - float("nan")).to(E4M3.dtype), torch.ones(1, 1), "'w.weight' holds 0x7f or 0xff, which are no numbers"),
     (E4M3, None, "'w.weight' is torch.float8_e4m3fn, expected a plain")],
)  # fmt: skip
def test_bad_e4m3_is_named(weight: Tensor, scales: Tensor | None, message: str) -> None:
    state: dict[str, Any] = {"w.weight": weight} | ({} if scales is None else {"w.weight_scale_inv": scales})
    with pytest.raises(ValueError, match=f"checkpoint tensor {message}"):
        bind(Linear(4, (Part("w", 4),)), state)
