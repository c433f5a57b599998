"""norm_linear: one kernel or the separate ops, against fp64; and one against the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyllm import ops
from pyllm.ops.fused import ACTS, activation
from tests.support.compare import EPS, assert_close
from tests.support.generate import normal

BF16 = torch.bfloat16
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
EPSILON = 1e-5


def normed(x: Tensor, g: Tensor, b: Tensor | None, kind: str) -> Tensor:
    h = x.double()
    if kind == "layer":
        h = h - h.mean(1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(1, keepdim=True) + EPSILON) * g.double()
    return h if b is None else h + b.double()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("m", [1, 8, 9, 65])
def test_against_fp64(m: int, dtype: torch.dtype, kind: str, device: str) -> None:
    k, n, u = 512, 2048, EPS[dtype]
    x, w, bias, g = normal(m, k, dtype=dtype, scale=5.0), normal(n, k, dtype=dtype), normal(n, dtype=dtype), normal(k, dtype=dtype)
    if kind == "layer":
        x += 20.0  # a mean well above the spread
    shift = normal(k, dtype=dtype) if kind == "layer" else None
    h = normed(x, g, shift, kind)
    sums = h @ w.double().T + bias.double()
    size = h.abs() @ w.double().abs().T + bias.double().abs()
    # Each normed value is rounded once, u |h w| each; the separate ops also round the sum. fp32 sums err by (k + 8) 2^-24.
    bound = (u + (k + 8) * EPS[torch.float32]) * size + u * sums.abs()
    moved = [t.to(device) for t in (x, g)] + [EPSILON, w.to(device), bias.to(device)]
    given = {"kind": kind, "norm_bias": None if shift is None else shift.to(device)}
    got = ops.norm_linear(*moved, **given)
    assert_close(got, sums, rtol=u, atol=bound)

    # Slope of silu at most 1.1; the separate ops round the gate, the product and the sum with the residual.
    residual = normal(m, n // 2, dtype=dtype)
    (gate, up), (gate_bound, up_bound) = sums.chunk(2, 1), bound.chunk(2, 1)
    silu = activation(gate, ACTS["silu"])
    product_bound = (1.1 * gate_bound + 2.0**-14 * silu.abs()) * (up.abs() + up_bound) + silu.abs() * up_bound + u * (silu * up).abs()
    got = ops.norm_linear(*moved, **given, act="silu", gated=True, residual=residual.to(device))
    assert_close(got, silu * up + residual.double(), rtol=u, atol=product_bound * (1 + 2 * u) + 2.0**-23 * residual.double().abs())


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8])
def test_the_kernel_against_the_separate_ops_on_adversarial_rows(m: int) -> None:
    """Outliers of 1,000 times the rest, a large common mean, tiny rows: both round each normed value once, so they differ by at most
    2 u sum |h w| and the roundings of both results."""
    k, n = 4096, 2048
    x, w, g = normal(m, k, scale=2.0), normal(n, k, dtype=BF16).cuda(), normal(k, dtype=BF16).cuda()
    x[:, 17] *= 1000
    x[m // 2] += 300
    x[m - 1] *= 1e-6
    x = x.bfloat16().cuda()
    fused = ops.norm_linear(x, g, EPSILON, w)
    separate = ops.linear(ops.rms_norm(x, g, EPSILON), w)
    size = normed(x, g, None, "rms").abs() @ w.double().abs().T
    u = EPS[BF16]
    assert_close(fused, separate, rtol=2 * u, atol=(2 * u + 2 * k * EPS[torch.float32]) * size)


def test_opcheck_and_compile() -> None:
    x, w, g = normal(3, 16), normal(16, 16), normal(16)
    for given in ({}, {"act": 0, "gated": True}, {"kind": 1, "norm_bias": g}):
        torch.library.opcheck(torch.ops.pyllm.norm_linear.default, (x, g, 1e-5, w), given)
    compiled = torch.compile(ops.norm_linear, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, g, 1e-5, w, act="gelu"), ops.norm_linear(x, g, 1e-5, w, act="gelu"))


@pytest.mark.parametrize("device", ["cpu", "meta", GPU])
def test_errors(device: str) -> None:
    x, w, g = torch.zeros(3, 32, device=device), torch.zeros(16, 32, device=device), torch.zeros(32, device=device)
    call = torch.ops.pyllm.norm_linear
    for args, given, message in (
        ((x[0], g, 1e-5, w), {}, "x has 1 dimensions, expected 2"),
        ((x, g[:8], 1e-5, w), {}, r"norm_weight has shape \(8,\), expected K=32 \(from x\)"),
        ((x, g, 1e-5, w, g), {}, r"bias has shape \(32,\), expected N=16"),
        ((x, g, 1e-5, w), {"norm_bias": g}, r"norm_bias is given, expected None unless kind is 1 \(layer\)"),
        ((x, g, 1e-5, w[:8]), {"gated": True, "act": 0}, r"weight \.size\(0\) is 8, expected a multiple of 16 with gated"),
        ((x, g, 1e-5, w), {"gated": True}, "act is missing, expected one with gated"),
        ((x, g, 1e-5, w), {"act": 7}, r"act is 7, expected -1 to 3"),
        ((x, g, 1e-5, w), {"kind": 2}, r"kind is 2, expected 0 \(rms\) or 1 \(layer\)"),
        ((x, g, 1e-5, w), {"residual": x}, r"residual has shape \(3, 32\), expected \(3, 16\)"),
    ):
        with pytest.raises(ValueError, match=f"norm_linear: {message}"):
            call(*args, **given)
    with pytest.raises(ValueError, match="kind is 'batch', expected one of rms, layer"):
        ops.norm_linear(x, g, 1e-5, w, kind="batch")
