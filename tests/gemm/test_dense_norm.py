"""linear_squares and linear_normed: an RMSNorm between two products, whose statistics come out of the first's epilogue."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops import dense_linear
from pyllm.ops.dense_norm import linear_normed, linear_squares
from pyllm.ops.fused import ACTS
from pyllm.ops.norm import rms_norm
from tests.fused.formulas import activation64
from tests.gemm.dense_cases import BF16, FP16, check_graph, check_repeats, wide
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows, poison_allocator
from tests.support.late import check_waits

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16])
SHAPES = [(0, 16, 16), (1, 16, 16), (3, 144, 32), (5, 272, 160)]
LARGE = [(63, 256, 128), (64, 128, 80), (65, 144, 64), (127, 112, 192), (129, 1040, 144), (300, 528, 272), (1030, 4096, 256)]


def shapes(device: str) -> list[tuple[int, int, int]]:
    return SHAPES + (LARGE if device == "cuda" else [])


@BOTH
@DTYPES
def test_squares(dtype, device):
    """The product is dense_linear's to the bit where that has this tile; the sums are those of its rounded values: 128 products and
    sums in fp32, at most 130 roundings of 2^-24 of a sum of positive terms."""
    for i, (m, n, k) in enumerate(shapes(device)):
        x, w = wide(m, k, i).to(dtype).to(device), normal(n, k, seed=i + 1).to(dtype).to(device)
        residual, bias = normal(m, n, dtype=dtype, seed=i + 2, device=device), normal(n, dtype=dtype, seed=i + 3, device=device)
        for b in (None, bias):
            poison_allocator((m, -(-n // 128)), torch.float32, x.device)
            y, squares = linear_squares(x, w, residual, b)
            assert_same(y, dense_linear(x, w, b, residual=residual))
            assert squares.shape == (m, -(-n // 128)) and squares.dtype == torch.float32 and squares.is_contiguous()
            want = torch.nn.functional.pad(y.double().square(), (0, -n % 128)).unflatten(1, (-1, 128)).sum(2)
            assert_close(squares, want, rtol=130 * 2.0**-24)


def exact(x, squares, eps, w, bias, act, gated):
    """fp64, and a bound of the error before the last rounding: as in test_dense_linear, and the row's factor, whose sum has one rounding of
    2^-24 for each part, whose square root halves that, and whose hardware rsqrt adds 2^-22."""
    x, w, k = x.cpu().double(), w.cpu().double(), x.shape[1]
    factor = (squares.cpu().double().sum(1, keepdim=True) / k + eps).rsqrt()
    y, magnitude = x @ w.T * factor, x.abs() @ w.abs().T * factor
    error = (k * 2.0**-24 + (squares.shape[1] + 2) * 2.0**-25 + 2.0**-22) * magnitude
    y = y if bias is None else y + bias.cpu().double()
    (v, up), (error, up_error) = (y.chunk(2, 1), error.chunk(2, 1)) if gated else ((y, None), (error, None))
    if act is not None:
        slope = 2 * (v.abs() + error) if act == "relu2" else 1.13
        v, error = activation64(v, act), slope * error + 2.0**-14 * activation64(v, act).abs()
    if up is not None:
        v, error = v * up, error * (up.abs() + up_error) + v.abs() * up_error
    return v, error + 2.0**-24 * v.abs()


@BOTH
@DTYPES
@pytest.mark.parametrize(("act", "gated"), [(None, False), *((act, gated) for act in ACTS for gated in (False, True))])
def test_normed(act, gated, dtype, device):
    """Rows of very different size; sums that are no sums of x say that they are what is read."""
    for i, (m, n, k) in enumerate(shapes(device)):
        x, w = wide(m, k, i).to(dtype).to(device), (normal(n, k, seed=i + 1) * k**-0.5).to(dtype).to(device)
        bias = normal(n, dtype=dtype, seed=i + 3, device=device) if i % 2 else None
        squares = torch.nn.functional.pad(x.float().square(), (0, -k % 128)).unflatten(1, (-1, 128)).sum(2) * (1 + i % 3)
        call = lambda: linear_normed(x, squares, 1e-5, w, bias, act=act, gated=gated)  # noqa: B023, E731
        got = check_repeats(call, (m, n // 2 if gated else n), dtype) if device == "cuda" and m else call()
        want, error = exact(x, squares, 1e-5, w, bias, act, gated)
        small = 2.0**-25 if dtype == FP16 else 0.0
        assert_close(got, want, rtol=EPS[dtype] * (1 + 2.0**-8), atol=error * (1 + EPS[dtype]) + small)


@BOTH
def test_a_norm_between_two_products(device):
    """Against the three ops, on rows with outliers and a zero row. What differs: the three round the normed rows and the weight once each
    (u = 2^-9 of a product), these the folded weight alone; each way is within those of the exact norm."""
    m, d, n = (130, 512, 272) if device == "cuda" else (7, 256, 48)
    x, w = normal(m, 64, dtype=BF16, device=device), (normal(d, 64, seed=1) * 0.1).to(BF16).to(device)
    residual, gamma = normal(m, d, dtype=BF16, seed=2, device=device), (normal(d, seed=3) * 0.2 + 1).to(device)
    residual[1, 5], x[2], residual[2] = 3e4, 0, 0
    down = (normal(n, d, seed=4) * d**-0.5).to(BF16).to(device)
    folded = (down.float() * gamma).to(BF16)
    if device == "cuda":
        torch.cuda.synchronize()  # weights are constants
    y, squares = linear_squares(x, w, residual)
    got, three = linear_normed(y, squares, 1e-6, folded), dense_linear(rms_norm(y, gamma, 1e-6), down)
    exact_rows = y.double() * (y.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * gamma.double()
    want, u = exact_rows @ down.double().T, EPS[BF16]
    bound = (u + (d + 8) * 2.0**-24) * (exact_rows.abs() @ down.double().abs().T)
    for found in (got, three):
        assert_close(found, want, rtol=u * (1 + u), atol=bound * (1 + 2 * u))
    assert got[2].eq(0).all()


@pytest.mark.gpu
def test_strided_rows_and_graph():
    x, intact = padded_rows(normal(130, 256, dtype=BF16).cuda(), gap=32, offset=16)
    w, residual = normal(144, 256, dtype=BF16).cuda(), normal(130, 144, dtype=BF16).cuda()
    for got, want in zip(linear_squares(x, w, residual), linear_squares(x.contiguous(), w, residual), strict=True):
        assert_same(got, want)
    squares = torch.rand(130, 2, device="cuda")
    assert_same(linear_normed(x, squares, 0.0, w), linear_normed(x.contiguous(), squares, 0.0, w))
    intact()
    check_graph(lambda: linear_squares(x, w, residual)[1], lambda: residual.uniform_(1, 2))
    check_graph(lambda: linear_normed(x, squares, 0.0, w), lambda: squares.uniform_(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(20, 1024, 512), (256, 1280, 4096), (2048, 2048, 512)])
def test_nothing_is_read_before_a_late_writer(shape):
    m, n, k = shape
    x, w, residual = normal(m, k, dtype=BF16).cuda(), (normal(n, k) * k**-0.5).to(BF16).cuda(), normal(m, n, dtype=BF16).cuda()
    squares = torch.rand(m, -(-k // 128), device="cuda") + 0.5
    check_waits(lambda t: linear_squares(t, w, residual)[1], x, "x")
    check_waits(lambda t: linear_squares(x, w, t)[1], residual, "residual")
    for how in ({}, {"act": "silu", "gated": True}):
        check_waits(lambda t: linear_normed(t, squares, 1e-6, w, **how), x, f"x {how}")  # noqa: B023
        check_waits(lambda t: linear_normed(x, t, 1e-6, w, **how), squares, f"squares {how}")  # noqa: B023


def test_opcheck():
    x, w, residual = normal(3, 32, dtype=BF16), normal(48, 32, dtype=BF16), normal(3, 48, dtype=BF16)
    tests = ("test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.pyllm.linear_squares.default, (x, w, residual, None), test_utils=tests)
    torch.library.opcheck(torch.ops.pyllm.linear_normed.default, (x, torch.rand(3, 1), 1e-6, w, None, 0, True), test_utils=tests)


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device):
    x, w = torch.zeros(3, 32, device=device, dtype=BF16), torch.zeros(48, 32, device=device, dtype=BF16)
    r, one = torch.zeros(3, 48, device=device, dtype=BF16), torch.ones(3, 1, device=device)
    for op, args, message in (
        ("linear_squares", (x, w, r[:, :40], None), r"residual ?\.size\(1\) is 40, expected 48"),
        ("linear_squares", (x.float(), w.float(), r, None), "x is float32, expected bfloat16 or float16"),
        ("linear_squares", (x, w, r.half(), None), "residual is float16, expected bfloat16"),
        ("linear_normed", (x, one.half(), 0.0, w, None, -1, False), "squares is float16, expected float32"),
        ("linear_normed", (x, one[:2], 0.0, w, None, -1, False), r"squares ?\.size\(0\) is 2, expected M=3"),
        ("linear_normed", (x, torch.cat([one, one], 1), 0.0, w, None, -1, False), r"squares ?\.size\(1\) is 2, expected 1"),
        ("linear_normed", (x, one, -1.0, w, None, -1, False), "eps ?is -1, expected finite and >= 0"),
        ("linear_normed", (x, one, 0.0, w, None, 4, False), "act ?is 4, expected -1 to 3"),
        ("linear_normed", (x, one, 0.0, w[:40], None, 0, True), r"weight ?\.size\(0\) is 40, expected a multiple of 16 with gated"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"{op}: {message}"):
            getattr(torch.ops.pyllm, op)(*args)
