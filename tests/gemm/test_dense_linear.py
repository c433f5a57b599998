"""dense_linear: bf16 and fp16 with bias, activation, gate, soft cap and residual."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops import dense_linear, linear
from pyllm.ops.gemm import DENSE_COLUMNS, DENSE_ROWS
from tests.fused.formulas import activation64
from tests.gemm.dense_cases import BF16, EDGES, FP16, SMALL, check_graph, check_repeats, wide
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16])


def exact(x, w, bias=None, residual=None, act=None, gated=False, softcap=0.0):
    """The formula in fp64, and a bound of the error of each element before the last rounding."""
    x, w = x.cpu().double(), w.cpu().double()
    y, k = x @ w.T, x.shape[1]
    # fp32 sums of k products: at most k 2^-24 of the sum of magnitudes. 2^-14: the fast activations' own error.
    error = k * EPS[torch.float32] * (x.abs() @ w.abs().T)
    if bias is not None:
        y = y + bias.cpu().double()
    # |act'| <= 1.13 for the three smooth ones; relu2 has 2 |v|.
    slope = (lambda v, e: 2 * (v.abs() + e)) if act == "relu2" else (lambda v, e: 1.13)
    if gated:
        (gate, up), (ge, ue) = y.chunk(2, 1), error.chunk(2, 1)
        g = activation64(gate, act) if act else gate
        y, error = g * up, slope(gate, ge) * ge * (up.abs() + ue) + g.abs() * ue + 2.0**-14 * (g * up).abs()
    elif act:
        y, error = activation64(y, act), slope(y, error) * error + 2.0**-14 * activation64(y, act).abs()
    if softcap:
        y, error = softcap * torch.tanh(y / softcap), error + softcap * 2.0**-20
    if residual is not None:
        y = y + residual.cpu().double()
    return y, error + 2.0**-24 * y.abs()


def check(shape, dtype, device, *, bias=False, residual=False, act=None, gated=False, softcap=0.0, seed=0):
    m, n, k = shape
    x, w = wide(m, k, seed).to(dtype), normal(n, k, seed=seed + 1).to(dtype)
    columns = n // 2 if gated else n
    b = normal(n, dtype=dtype, seed=seed + 2) if bias else None
    r = normal(m, columns, dtype=dtype, seed=seed + 3) if residual else None
    want, error = exact(x, w, b, r, act, gated, softcap)
    put = lambda t: None if t is None else t.to(device)  # noqa: E731
    args = (put(x), put(w), put(b))
    call = lambda: dense_linear(*args, residual=put(r), act=act, gated=gated, softcap=softcap)  # noqa: E731
    got = check_repeats(call, (m, columns), dtype) if device == "cuda" and m else call()
    assert got.dtype == dtype and got.is_contiguous()
    small = 2.0**-25 if dtype == FP16 else 0.0  # half of fp16's smallest step
    assert_close(got, want, rtol=EPS[dtype] * (1 + 2.0**-8), atol=error * (1 + EPS[dtype]) + small)


@BOTH
@DTYPES
@pytest.mark.parametrize("shape", SMALL)
def test_small(shape, dtype, device):
    check(shape, dtype, device)
    check(shape, dtype, device, bias=True)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("shape", EDGES)
def test_edges(shape, dtype):
    check(shape, dtype, "cuda", bias=True, seed=shape[0])


@BOTH
@pytest.mark.parametrize("act", [None, "silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [False, True])
def test_epilogue(gated, act, device):
    for shape in ((5, 32, 64), *(((129, 272, 208), (300, 1056, 64)) if device == "cuda" else ())):
        check(shape, BF16, device, act=act, gated=gated)
        check(shape, BF16, device, act=act, gated=gated, bias=True, residual=True, softcap=30.0)


@pytest.mark.gpu
def test_wide_tiles_of_gated_products():
    """11 x 13 tiles of 128 x 128 would be two waves on 132 SMs: tiles of 128 x 160 serve this shape, the last ones clipped both ways."""
    check((1403, 1552, 208), BF16, "cuda", act="silu", gated=True)
    check((1403, 1552, 208), BF16, "cuda", act="gelu_tanh", gated=True, bias=True, residual=True, seed=1)


@pytest.mark.gpu
def test_strided_rows():
    x, intact_x = padded_rows(normal(130, 96, dtype=BF16).cuda(), gap=16, offset=8)
    w, intact_w = padded_rows(normal(48, 96, dtype=BF16).cuda(), gap=8)
    r, intact_r = padded_rows(normal(130, 48, dtype=BF16).cuda(), gap=24)
    want = dense_linear(x.contiguous(), w.contiguous(), residual=r.contiguous())
    assert_same(dense_linear(x, w, residual=r), want)
    for intact in (intact_x, intact_w, intact_r):
        intact()


@pytest.mark.gpu
def test_nan_and_inf_stay_in_their_rows():
    x, w = normal(200, 128, dtype=BF16).cuda(), normal(256, 128, dtype=BF16).cuda()
    want = dense_linear(x, w)
    x[77, 5], x[150, 0] = float("nan"), float("inf")
    got = dense_linear(x, w)
    assert got[77].isnan().all() and not got[150].isfinite().any()
    keep = [i for i in range(200) if i not in (77, 150)]
    assert_same(got[keep], want[keep])


@pytest.mark.gpu
def test_linear_takes_it_for_many_rows():
    x, w = normal(DENSE_ROWS, 64, dtype=BF16).cuda(), normal(DENSE_COLUMNS, 64, dtype=BF16).cuda()
    b = normal(2 * DENSE_COLUMNS, dtype=BF16).cuda()[::2]
    assert_same(linear(x, w, b), dense_linear(x, w, b.contiguous()))


@pytest.mark.gpu
def test_graph():
    x, w = normal(257, 512, dtype=BF16).cuda(), normal(1040, 512, dtype=BF16).cuda()
    check_graph(lambda: dense_linear(x, w), lambda: x.copy_(normal(257, 512, dtype=BF16, seed=5)))


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_32_bits():
    """x of 2^31 + 2^20 elements: the last rows against the same rows alone."""
    k = 1024
    m = (2**31 + 2**20) // k
    x, w = torch.randn(m, k, device="cuda", dtype=BF16), normal(1024, k, dtype=BF16).cuda()
    assert_same(dense_linear(x, w)[-256:], dense_linear(x[-512:], w)[-256:])


def test_opcheck_and_compile():
    x, w = normal(3, 32, dtype=BF16), normal(32, 32, dtype=BF16)
    r = normal(3, 16, dtype=BF16)
    torch.library.opcheck(torch.ops.pyllm.dense_linear.default, (x, w, None, r, 0, True, 0.0))
    compiled = torch.compile(dense_linear, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x, w, residual=r, act="silu", gated=True), dense_linear(x, w, residual=r, act="silu", gated=True))


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device):
    x, w = torch.zeros(3, 32, dtype=BF16, device=device), torch.zeros(24, 32, dtype=BF16, device=device)
    op = torch.ops.pyllm.dense_linear
    for args, message in (
        ((x[0], w), "x has 1 dimensions, expected 2"),
        ((x.float(), w), "x is float32, expected bfloat16 or float16"),
        ((x, w.half()), "weight is float16, expected bfloat16 like x"),
        ((x, w[:, :16]), r"weight ?\.size\(1\) is 16, expected K=32"),
        ((x[:, :12], w[:, :12]), r"x ?\.size\(1\) is 12, expected a multiple of 8 from 16"),
        ((x, w[:12]), r"weight ?\.size\(0\) is 12, expected a multiple of 8 from 16"),
        ((x.T.contiguous().T, w), r"x ?\.stride\(1\) is 3, expected 1"),
        ((x, w, w[0]), r"bias ?\.size\(0\) is 32, expected N=24"),
        ((x, w, None, x), r"residual ?\.size\(1\) is 32, expected 24"),
        ((x, w, None, None, 4), "act is 4, expected -1 to 3"),
        ((x, w, None, None, 0, True), r"weight ?\.size\(0\) is 24, expected a multiple of 16 with gated"),
        (
            (x, w, None, None, -1, False, -1.0),
            "softcap is -1, expected finite and >= 0" if device == "cuda" else "softcap is -1.0, expected",
        ),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"dense_linear: {message}"):
            op(*args)
    with pytest.raises(ValueError, match="dense_linear: act is 'tanh'"):
        dense_linear(x, w, act="tanh")
