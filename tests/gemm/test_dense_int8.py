"""linear_int8: exact int32 sums, scaled per row and column."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops import linear_int8
from tests.gemm.dense_cases import BF16, EDGES, FP16, SMALL, check_graph, check_repeats
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def whole(rows, columns, seed=0):
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def check(shape, device, *, tensor=False, bias=False, out_dtype=BF16, seed=0):
    m, n, k = shape
    x, w = whole(m, k, seed), whole(n, k, seed + 1)
    x_scale, w_scale = normal(1 if tensor else m, seed=seed).abs() + 2.0**-8, normal(1 if tensor else n, seed=seed + 1).abs() * 2.0**-9
    b = normal(n, dtype=out_dtype, seed=seed + 2) if bias else None
    want = (x.double() @ w.double().T) * x_scale.double()[:, None] * w_scale.double()
    error = 4 * EPS[torch.float32] * want.abs()  # the int32 sum, two scales and the bias: four fp32 roundings
    if b is not None:
        want = want + b.double()
        error = error + EPS[torch.float32] * want.abs()
    args = [t.to(device) for t in (x, w, x_scale, w_scale)] + [None if b is None else b.to(device)]
    call = lambda: linear_int8(*args, out_dtype=out_dtype)  # noqa: E731
    got = check_repeats(call, (m, n), out_dtype) if device == "cuda" and m else call()
    assert got.dtype == out_dtype
    small = 2.0**-25 if out_dtype == FP16 else 0.0
    want16 = want.clamp(-65504 * (1 + 2.0**-12), 65504 * (1 + 2.0**-12)) if out_dtype == FP16 else want
    assert_close(got, want16, rtol=EPS[out_dtype] * (1 + 2.0**-8), atol=error + small)


@BOTH
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("shape", SMALL)
def test_small(shape, tensor, device):
    check(shape, device, tensor=tensor)
    check(shape, device, tensor=tensor, bias=True, out_dtype=FP16, seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(m, n + 15 & ~15, k) for m, n, k in EDGES])
def test_edges(shape):
    check(shape, "cuda", bias=True, seed=shape[0])


@BOTH
def test_extremes(device):
    """All -128 times all -128: the largest sums there are, exact."""
    k = 4096
    x, w = torch.full((65, k), -128, dtype=torch.int8, device=device), torch.full((16, k), -128, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    assert_same(linear_int8(x, w, one, one), torch.full((65, 16), 128.0 * 128 * k, dtype=BF16))


@pytest.mark.gpu
def test_strided_rows():
    x, intact_x = padded_rows(whole(130, 96).cuda(), gap=32, offset=16)
    w, intact_w = padded_rows(whole(48, 96).cuda(), gap=16)
    one, rows = torch.rand(1, device="cuda"), torch.rand(130, device="cuda")
    assert_same(linear_int8(x, w, rows, one), linear_int8(x.contiguous(), w.contiguous(), rows, one))
    intact_x()
    intact_w()


@pytest.mark.gpu
def test_graph():
    x, w = whole(257, 512).cuda(), whole(1040, 512).cuda()
    xs, ws = torch.rand(257, device="cuda"), torch.rand(1040, device="cuda")
    check_graph(lambda: linear_int8(x, w, xs, ws), lambda: xs.uniform_(1, 2))


def test_opcheck_and_compile():
    args = (whole(3, 32), whole(32, 32), torch.rand(3), torch.rand(32))
    torch.library.opcheck(torch.ops.pyllm.linear_int8.default, (*args, normal(32, dtype=FP16), True))
    assert_same(torch.compile(linear_int8, fullgraph=True, backend="aot_eager")(*args), linear_int8(*args))


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device):
    x, w = torch.zeros(3, 32, device=device, dtype=torch.int8), torch.zeros(48, 32, device=device, dtype=torch.int8)
    one, rows = torch.ones(1, device=device), torch.ones(3, device=device)
    op = torch.ops.pyllm.linear_int8
    for args, message in (
        ((x.float(), w, one, one), "x is float32, expected int8"),
        ((x[:, :24], w[:, :24], one, one), r"x ?\.size\(1\) is 24, expected a multiple of 16"),
        ((x, w[:24], one, one), r"weight ?\.size\(0\) is 24, expected a multiple of 16"),
        ((x, w, rows[:2], one), r"x_scale ?\.size\(0\) is 2, expected 1 or M=3"),
        ((x, w, one, rows), r"weight_scale ?\.size\(0\) is 3, expected 1 or N=48"),
        ((x, w, one, one, rows), "bias ?.size.0. is 3, expected N=48|bias ?.size.0. is 3, expected N=48"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"linear_int8: {message}"):
            op(*args)
    with pytest.raises(ValueError, match="linear_int8: out_dtype is torch.float32"):
        linear_int8(x, w, one, one, out_dtype=torch.float32)
