"""linear_fp8: e4m3 with scales per tensor, per row and column, and per block."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops import linear_fp8, quantize_fp8
from pyllm.ops.fused import ACTS
from tests.fused.formulas import FLUSH, activation64, activation_error
from tests.gemm.dense_cases import BF16, EDGES, FP16, SMALL, check_graph, check_repeats, wide
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import FP8, normal, padded_rows, poisoned

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
KINDS = pytest.mark.parametrize("kind", ["tensor", "row", "mixed", "block"])


def scales(kind, m, n, k, seed):
    if kind == "block":
        x_scale, w_scale = torch.rand(m, -(-k // 128)), torch.rand(-(-n // 128), -(-k // 128))
    else:
        x_scale = torch.rand(1 if kind == "tensor" else m)
        w_scale = torch.rand(1 if kind in ("tensor", "mixed") else n)
    return (x_scale + 0.5) * 2.0 ** (seed % 5), w_scale * 0.1 + 0.01


def expanded(scale, kind, rows, k, square):
    """One scale per element of the operand, fp64."""
    s = scale.double()
    if kind != "block":
        return s[:, None].expand(1 if s.numel() == 1 else rows, k)
    return (s.repeat_interleave(128, 0)[:rows] if square else s).repeat_interleave(128, 1)[:, :k]


def check(shape, kind, device, *, bias=False, out_dtype=BF16, seed=0, act=None):
    m, n, k = shape
    torch.manual_seed(seed)
    x, w = wide(m, k, seed).clamp(-448, 448).to(FP8), normal(n, k, dtype=FP8, seed=seed + 1)
    x_scale, w_scale = scales(kind, m, n, k, seed)
    if act is not None and out_dtype == FP16:  # products of two sums would leave its range
        w_scale = w_scale / 256
    b = normal(n, dtype=out_dtype, seed=seed + 2) if bias else None
    xs, ws = x.double() * expanded(x_scale, kind, m, k, False), w.double() * expanded(w_scale, kind, n, k, True)
    want, magnitude = xs @ ws.T, xs.abs() @ ws.abs().T
    if b is not None:
        want = want + b.double()
    args = [t.to(device) for t in (x, w, x_scale, w_scale)] + [None if b is None else b.to(device)]
    call = lambda: linear_fp8(*args, out_dtype=out_dtype, act=act, gated=act is not None)  # noqa: E731
    got = check_repeats(call, (m, n if act is None else n // 2), out_dtype) if device == "cuda" and m else call()
    assert got.dtype == out_dtype
    # The tensor core aligns the products of an instruction (32 of K) and its accumulator to the largest and drops what is below 2^-13 of
    # it: each of the K / 32 steps errs by at most 33 of those of the largest magnitude seen, which is at most the sum of magnitudes. By
    # blocks the sums restart every 4 steps. The CPU and the scaling add a few 2^-24 per product.
    steps = 4 if kind == "block" else -(-k // 32)
    coarse = 2.0**-13 * min(steps, 8) if device == "cuda" else 0.0
    error = (coarse + (k + 8) * EPS[torch.float32]) * magnitude
    if act is not None:
        want, error = gated64(want, error, act, out_dtype)
    assert_close(got, want, rtol=EPS[out_dtype] * (1 + 2.0**-8), atol=error + (2.0**-25 if out_dtype == FP16 else 0.0))


def gated64(y, error, act, dtype):
    """act(gate) * up and its error: of the sums (no activation is steeper than 1.13, relu2 than 2 |gate|), and of the activation itself."""
    (gate, up), (gate_error, up_error) = y.chunk(2, 1), error.chunk(2, 1)
    a, slope = activation64(gate, act), 2 * (gate.abs() + gate_error) if act == "relu2" else 1.13
    own = a.abs() * activation_error(gate, act, dtype) + FLUSH
    return a * up, (slope * gate_error + own) * (up.abs() + up_error) + a.abs() * up_error


@BOTH
@pytest.mark.parametrize("act", ACTS)
def test_gated(act, device):
    """Few rows (the kernel of decode), many, and columns that end inside a tile."""
    for shape in ((1, 32, 64), (5, 96, 400), (17, 528, 272), (300, 160, 512)) if device == "cuda" else ((5, 96, 48),):
        check(shape, "row", device, act=act, seed=shape[0])
        check(shape, "mixed", device, act=act, bias=True, out_dtype=FP16, seed=1)


@pytest.mark.gpu
def test_wide_tiles_of_gated_products():
    """11 x 13 tiles of 128 x 128 would be two waves on 132 SMs: tiles of 128 x 160 serve this shape, the last ones clipped both ways."""
    check((1403, 1552, 272), "row", "cuda", act="silu", seed=1)
    check((1403, 1552, 272), "mixed", "cuda", act="gelu", bias=True, out_dtype=FP16, seed=2)


def test_gated_wants_an_activation_and_no_blocks():
    x, w, one = torch.zeros(3, 32).to(FP8), torch.zeros(48, 32).to(FP8), torch.ones(1)
    for options, message in (({"gated": True}, "act is None, expected one of"), ({"act": "silu"}, "act is 'silu', expected None")):
        with pytest.raises(ValueError, match=f"linear_fp8: {message}"):
            linear_fp8(x, w, one, one, **options)
    with pytest.raises(ValueError, match="linear_fp8_gated: x_scale has 2 dimensions, expected 1"):
        linear_fp8(x, w, torch.ones(3, 1), torch.ones(1, 1), act="silu", gated=True)


@BOTH
@KINDS
@pytest.mark.parametrize("shape", SMALL)
def test_small(shape, kind, device):
    check(shape, kind, device)
    check(shape, kind, device, bias=True, out_dtype=FP16, seed=3)


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("shape", [(m, n + 15 & ~15, k) for m, n, k in EDGES])
def test_edges(shape, kind):
    check(shape, kind, "cuda", bias=True, seed=shape[0])


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        *((17, 2048, 2048), (32, 528, 2064), (33, 2048, 8192), (64, 1040, 4096), (63, 4096, 4096), (64, 6144, 4096), (20, 7168, 1024)),
        *((24, 3072, 2048), (40, 8192, 1024), (57, 28688, 144)),
    ],
)
def test_few_rows(shape, out_dtype):
    """Tiles of 64 rows: one CTA for all of K, and K cut over clusters of two and four; more tiles than SMs."""
    check(shape, "row", "cuda", bias=out_dtype == BF16, out_dtype=out_dtype, seed=shape[0])


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 8, 9, 10, 11, 15, 16, 17, 18, 25])
def test_stages_of_blocks(stages):
    """Sums by blocks alternate between two buffers and hold the scales of eight stages: an end behind each count of both."""
    check((130, 272, 128 * stages), "block", "cuda", seed=stages)
    check((257, 144, 128 * stages - 48), "block", "cuda", bias=True, seed=stages + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 8, 9, 11, 12, 13, 16, 17, 18, 25, 31, 32, 33, 41])
def test_blocks_of_few_rows(stages):
    """Tiles of 64 rows, whose ring has 12 stages that are asked for in pairs: K whole, and from 16 stages on cut in two; rows by eight."""
    for m, n in ((1, 272), (9, 528), (64, 1040)):
        check((m, n, 128 * stages), "block", "cuda", bias=m == 9, out_dtype=FP16 if m == 64 else BF16, seed=stages)
        check((m, n, 128 * stages - 48), "block", "cuda", seed=stages + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(33, 16400, 400), (64, 16384, 1040), (5, 33040, 256), (63, 128 * 400, 144)])
def test_wide_tiles_of_blocks_of_few_rows(shape):
    """More tiles of 64 columns than SMs: tiles of 128, more than one for some CTAs."""
    check(shape, "block", "cuda", seed=shape[0])


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [2, 9])
def test_tiles_of_blocks(stages):
    """297 tiles: some CTAs walk over two, some over three."""
    check((1100, 4112, 128 * stages), "block", "cuda", seed=stages)


@pytest.mark.gpu
@KINDS
def test_fp16_results(kind):
    check((300, 528, 400), kind, "cuda", out_dtype=FP16)


@pytest.mark.gpu
def test_strided_rows():
    x, intact_x = padded_rows(normal(130, 96, dtype=FP8).cuda(), gap=32, offset=16)
    w, intact_w = padded_rows(normal(48, 96, dtype=FP8).cuda(), gap=16)
    one, rows = torch.rand(1, device="cuda"), torch.rand(130, device="cuda")
    assert_same(linear_fp8(x, w, rows, one), linear_fp8(x.contiguous(), w.contiguous(), rows, one))
    intact_x()
    intact_w()


@pytest.mark.gpu
def test_scales_beside_poison():
    """Nothing beyond the scales is read: they end where NaN begins."""
    m, n, k = 130, 144, 144
    x, w = normal(m, k, dtype=FP8).cuda(), normal(n, k, dtype=FP8).cuda()
    x_blocks, w_blocks = poisoned(m + 1, 5, dtype=torch.float32, device="cuda"), poisoned(3, 4, dtype=torch.float32, device="cuda")
    x_blocks[:m, :2], w_blocks[:2, :2] = torch.rand(m, 2), torch.rand(2, 2)
    assert linear_fp8(x, w, x_blocks[:m, :2], w_blocks[:2, :2]).isfinite().all()


@BOTH
def test_a_quantized_product_is_close(device):
    """From bf16 through quantize_fp8: the whole product's relative error is that of two e4m3 roundings, 2^-4 / sqrt(3) each."""
    x, w = normal(65, 256, dtype=BF16), normal(48, 256, dtype=BF16)
    (xq, xs), (wq, ws) = quantize_fp8(x.to(device), "token"), quantize_fp8(w.to(device), "token")
    if device == "cuda":
        torch.cuda.synchronize()  # a weight is a constant: the product may read it before a kernel ahead of it has written it
    got, want = linear_fp8(xq, wq, xs, ws).cpu().double(), x.double() @ w.double().T
    assert (got - want).norm() / want.norm() < 2.0**-4


@pytest.mark.gpu
def test_graph():
    x, w = normal(257, 512, dtype=FP8).cuda(), normal(1040, 512, dtype=FP8).cuda()
    xs, ws = torch.rand(257, device="cuda"), torch.rand(1040, device="cuda")
    check_graph(lambda: linear_fp8(x, w, xs, ws), lambda: xs.uniform_(1, 2))


def test_opcheck_and_compile():
    x, w = normal(3, 32, dtype=FP8), normal(32, 32, dtype=FP8)
    args = (x, w, torch.rand(3), torch.rand(32))
    torch.library.opcheck(
        torch.ops.pyllm.linear_fp8.default,
        (*args, normal(32, dtype=FP16), True),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )
    assert_same(torch.compile(linear_fp8, fullgraph=True, backend="aot_eager")(*args), linear_fp8(*args))


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device):
    x, w = torch.zeros(3, 32, device=device).to(FP8), torch.zeros(48, 32, device=device).to(FP8)
    one, rows = torch.ones(1, device=device), torch.ones(3, device=device)
    half = torch.ones(48, device=device, dtype=BF16)
    op = torch.ops.pyllm.linear_fp8
    for args, message in (
        ((x.float(), w, one, one), "x is float32, expected float8_e4m3fn"),
        ((x[:, :24], w[:, :24], one, one), r"x ?\.size\(1\) is 24, expected a multiple of 16"),
        ((x, w[:24], one, one), r"weight ?\.size\(0\) is 24, expected a multiple of 16"),
        ((x, w, rows[:2], one), r"x_scale ?\.size\(0\) is 2, expected 1 or M=3"),
        ((x, w, one, rows), r"weight_scale ?\.size\(0\) is 3, expected 1 or N=48"),
        ((x, w, one.half(), one), "x_scale is float16, expected float32"),
        ((x, w, rows[:, None], one), "weight_scale has 1 dimensions, expected 2"),
        ((x, w, rows[:2, None], one[:, None]), r"x_scale has shape \[2, 1\], expected \[3, 1\]"),
        ((x, w, one, one, half, True), "bias is bfloat16, expected float16"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"linear_fp8: {message}"):
            op(*args)
    with pytest.raises(ValueError, match="linear_fp8: out_dtype is torch.float32"):
        linear_fp8(x, w, one, one, out_dtype=torch.float32)
