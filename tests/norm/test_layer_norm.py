from __future__ import annotations

import pytest
import torch

from pyllm.ops.norm import layer_norm
from tests.norm import rows
from tests.norm.rows import CUDA, DTYPES, EPSILON, WIDTHS
from tests.support.compare import assert_close, assert_same

BF16, FP16, FP32 = DTYPES


def norm(x, weight, bias, residual, quant, scale):  # the shape that tests/norm/rows.py calls
    return layer_norm(x, weight, bias, EPSILON, residual, quant, scale)


@pytest.mark.parametrize("T", [0, 1, 5])
@pytest.mark.parametrize("N", [8, 264, 4096])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)])
def test_reference(T, N, dtype, weight_dtype):
    rows.check_norm(norm, rows.layer64, T, N, dtype, weight_dtype, "cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_bias(device):
    x, weight, _, _ = rows.inputs(5, 4096, BF16, BF16, device)
    want, slack = rows.layer64(x.cpu(), weight.cpu(), None)
    rows.check_result(norm(x, weight, None, None, None, None), want, slack, "no bias")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("N", [40, 576, 4096, 8200])
def test_large_mean(N, device):
    """mean / std = 4096: E[x^2] - mean^2 would lose all 24 bits; the centred sum keeps what rounding the mean leaves (2^-12 of std)."""
    x = (4096 + torch.randn(3, N)).to(device)
    weight, bias = torch.ones(N, device=device), torch.zeros(N, device=device)
    exact = x.cpu().double()
    want = torch.nn.functional.layer_norm(exact, (N,), eps=EPSILON)
    # The mean is off by at most 8 roundings at 4096 (its partial sums grow with the terms): 8 * 4096 * 2^-24 = 2^-9 of std.
    assert_close(norm(x, weight, bias, None, None, None), want, rtol=2.0**-9, atol=2.0**-9)


def test_errors():
    x, w = torch.zeros(4, 16, dtype=BF16), torch.ones(16, dtype=BF16)
    for bias, message in (
        (torch.zeros(8, dtype=BF16), r"bias .size\(0\) is 8, expected N=16"),
        (torch.zeros(16), "bias is float32, expected bfloat16 like weight"),
        (torch.zeros(16, dtype=FP16), "bias is float16"),
    ):
        for device in ("cpu", "meta"):
            with pytest.raises(ValueError, match=f"layer_norm: {message}"):
                layer_norm(x.to(device), w.to(device), bias.to(device), EPSILON)
    with pytest.raises(ValueError, match="layer_norm: eps is inf, expected finite and at least 0"):
        layer_norm(x, w, None, float("inf"))
    with pytest.raises(ValueError, match="layer_norm: quant is 'tensor'"):
        layer_norm(x, w, None, EPSILON, quant="tensor")


@pytest.mark.gpu
def test_errors_cuda():
    x, w = torch.zeros(4, 16, dtype=BF16, device=CUDA), torch.ones(16, dtype=BF16, device=CUDA)
    with pytest.raises(RuntimeError, match="layer_norm: bias is float32, expected bfloat16 like weight"):
        layer_norm(x, w, w.float(), EPSILON)
    with pytest.raises(RuntimeError, match=r"layer_norm: bias .size\(0\) is 8, expected N=16"):
        layer_norm(x, w, w[:8], EPSILON)
    with pytest.raises(RuntimeError, match="layer_norm: bias is on the CPU|layer_norm.*device"):
        layer_norm(x, w, w.cpu(), EPSILON)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(device):
    x, weight, bias, residual = rows.inputs(3, 64, BF16, BF16, device)
    for arguments in (
        (x, weight, None, EPSILON),
        (x, weight.float(), bias.float(), EPSILON, residual, 1),
        (x, weight, bias, EPSILON, residual, 2, torch.ones(1, device=device)),
    ):
        torch.library.opcheck(torch.ops.pyllm.layer_norm.default, arguments)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compile(device):
    x, weight, bias, residual = rows.inputs(3, 64, BF16, BF16, device)
    want_residual = residual.clone()
    want = norm(x, weight, bias, want_residual, None, None)
    got = torch.compile(norm, fullgraph=True, backend="aot_eager")(x, weight, bias, residual, None, None)
    assert_same(got, want)
    assert_same(residual, want_residual)


@pytest.mark.gpu
@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32)])
def test_kernel(N, dtype, weight_dtype):
    for T in (0, 1, 3, 70):
        rows.check_norm(norm, rows.layer64, T, N, dtype, weight_dtype, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [64, 1032, 4096, 20480])
def test_many_rows(N):
    rows.check_norm(norm, rows.layer64, 2500, N, BF16, BF16, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [64, 1032, 2568, 4096, 8192, 32768])
def test_batch_invariance(N):
    rows.check_invariance(norm, N, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [576, 4096, 8192])
def test_graph_and_chain(N):
    rows.check_graph_and_chain(norm, N)


@pytest.mark.gpu
def test_far_rows():
    rows.check_far_rows(norm)
