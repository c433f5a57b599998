"""linear_e4m3: products of bf16 and e4m3 whose epilogue rounds to e4m3 with a given scale."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.dense_e4m3 import linear_e4m3
from pyllm.ops.fused import ACTS
from tests.fused.formulas import FLUSH, activation64, activation_error
from tests.gemm.dense_cases import BF16, EDGES, FP16, check_graph, check_repeats
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import FP8, normal, padded_rows
from tests.support.late import check_waits

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
TYPES = pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
KINDS = [(None, False), *((act, gated) for act in ACTS for gated in (False, True))]


def operands(m: int, n: int, k: int, dtype: torch.dtype, bias: torch.dtype | None, seed: int) -> dict[str, torch.Tensor | None]:
    """Products of about 1, of which the scale makes steps that differ by row and reaches the largest value."""
    torch.manual_seed(seed)
    x, w = normal(m, k, seed=seed), normal(n, k, seed=seed + 1) * (1.0 if dtype == FP8 else k**-0.5)
    scales = {"x_scale": torch.rand(m) + 0.5, "weight_scale": (torch.rand(n) + 0.5) * k**-0.5} if dtype == FP8 else {}
    b = None if bias is None else normal(n, dtype=bias, seed=seed + 2)
    return {"x": x.to(dtype), "weight": w.to(dtype), "out_scale": torch.tensor([0.006]), "bias": b, **scales}


def exact(x, weight, out_scale, bias, act, gated, device, x_scale=None, weight_scale=None):
    """y in fp64 and how far the kernel's y may be from it. The sums: as in test_dense_fp8; of bf16 products fp32 roundings alone."""
    k = x.shape[1]
    xs = x.double() * (1.0 if x_scale is None else x_scale.double()[:, None])
    ws = weight.double() * (1.0 if weight_scale is None else weight_scale.double()[:, None])
    y, magnitude = xs @ ws.T, xs.abs() @ ws.abs().T
    coarse = 2.0**-13 * min(-(-k // 32), 8) if device == "cuda" and x.dtype == FP8 else 0.0
    error = (coarse + (k + 8) * EPS[torch.float32]) * magnitude
    if bias is not None:
        y = y + bias.double()
    (v, up), (error, up_error) = (y.chunk(2, 1), error.chunk(2, 1)) if gated else ((y, None), (error, None))
    if act is not None:
        slope = 2 * (v.abs() + error) if act == "relu2" else 1.13  # no activation is steeper
        a = activation64(v, act)
        v, error = a, slope * error + a.abs() * activation_error(v, act, FP16) + FLUSH
    return (v, error) if up is None else (v * up, error * (up.abs() + up_error) + v.abs() * up_error)


def check(shape, dtype, device, act=None, gated=False, bias=None, seed=0):
    given = operands(*shape, dtype, bias, seed)
    want, error = exact(**given, act=act, gated=gated, device=device)
    on = {name: None if t is None else t.to(device) for name, t in given.items()}
    call = lambda: linear_e4m3(**on, act=act, gated=gated)  # noqa: E731
    columns = shape[1] // 2 if gated else shape[1]
    got = check_repeats(call, (shape[0], columns), FP8) if device == "cuda" and shape[0] else call()
    assert got.dtype == FP8 and got.shape == (shape[0], columns) and got.is_contiguous()
    scale = 0.006
    want = want.clamp(-448 * scale, 448 * scale)
    # One rounding to e4m3: 2^-4 of the value, or half the smallest step, 2^-10 of the scale; the factor 1 / scale has two of fp32.
    bound = error + (want.abs() + error) * (2.0**-4 + 2.0**-22) + 2.0**-10 * scale
    assert_close(got.double() * scale, want, atol=bound)
    assert got.float().abs().max() > 100 if got.numel() else True, "the scale must be one that the values use"


@BOTH
@TYPES
@pytest.mark.parametrize(("act", "gated"), KINDS)
def test_small(act, gated, dtype, device):
    for i, shape in enumerate(((0, 32, 16), (1, 32, 64), (5, 96, 48), (3, 288, 400))):
        check(shape, dtype, device, act, gated, (None, BF16, FP16)[i % 3], seed=i)


@pytest.mark.gpu
@TYPES
@pytest.mark.parametrize(("act", "gated"), [(None, False), ("relu2", False), ("silu", True), ("gelu_tanh", True)])
@pytest.mark.parametrize("shape", [(m, n + 31 & ~31, k + 15 & ~15) for m, n, k in EDGES])
def test_edges(shape, act, gated, dtype):
    check(shape, dtype, "cuda", act, gated, BF16 if shape[0] % 2 else FP16, seed=shape[0])


@pytest.mark.gpu
@TYPES
def test_both_tiles_of_gated_products(dtype):
    """11 x 13 tiles of 128 x 128 would be two waves on 132 SMs: 128 x 160 serves this shape, the last tiles clipped both ways."""
    check((1403, 1568, 272), dtype, "cuda", "silu", True, BF16, seed=1)
    check((1403, 4128, 272), dtype, "cuda", "gelu", True, None, seed=2)


@BOTH
@TYPES
def test_special_values(dtype, device):
    """NaN stays NaN, what is past the largest value takes it, zeros stay zeros: one row each."""
    x, w = torch.zeros(4, 32), torch.ones(32, 32)
    x[0, 0], x[1, 0], x[2, 0] = float("nan"), 400.0, -400.0
    one = torch.ones(1, device=device)
    scales = {"x_scale": one, "weight_scale": one} if dtype == FP8 else {}
    got = linear_e4m3(x.to(dtype).to(device), w.to(dtype).to(device), one * 0.5, **scales).float().cpu()
    assert got[0].isnan().all()
    assert got[1].eq(448).all() and got[2].eq(-448).all() and got[3].eq(0).all()


@pytest.mark.gpu
@TYPES
def test_strided_rows(dtype):
    given = {name: None if t is None else t.cuda() for name, t in operands(130, 64, 96, dtype, BF16, 1).items()}
    x, intact_x = padded_rows(given.pop("x"), gap=32, offset=16)
    w, intact_w = padded_rows(given.pop("weight"), gap=16)
    assert_same(linear_e4m3(x, w, **given).view(torch.uint8), linear_e4m3(x.contiguous(), w.contiguous(), **given).view(torch.uint8))
    intact_x()
    intact_w()


@pytest.mark.gpu
def test_graph():
    given = {name: None if t is None else t.cuda() for name, t in operands(257, 1056, 512, FP8, None, 1).items()}
    check_graph(lambda: linear_e4m3(**given, act="silu", gated=True).view(torch.uint8), lambda: given["x_scale"].uniform_(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(20, 2048, 512), (256, 1280, 4096), (2048, 2048, 512)])
def test_nothing_is_read_before_a_late_writer(shape):
    """Right behind a kernel that lets it start at once and writes late: x, and the scales of its rows."""
    given = {name: None if t is None else t.cuda() for name, t in operands(*shape, FP8, None, 1).items()}
    plain = {name: None if t is None else t.cuda() for name, t in operands(*shape, BF16, None, 1).items()}
    for gated in (True, False):
        how = {"act": "silu", "gated": gated}
        for name in ("x", "x_scale"):
            call = lambda t: linear_e4m3(**given | {name: t}, **how).view(torch.uint8)  # noqa: B023, E731
            check_waits(call, given[name], f"{name}, gated {gated}")
        check_waits(lambda t: linear_e4m3(**plain | {"x": t}, **how).view(torch.uint8), plain["x"], f"x in bf16, gated {gated}")  # noqa: B023


@TYPES
def test_opcheck_and_compile(dtype):
    g = operands(3, 64, 32, dtype, FP16, 0)
    args = (g["x"], g["weight"], g["out_scale"], g["bias"], g.get("x_scale"), g.get("weight_scale"), 0, True)
    torch.library.opcheck(torch.ops.pyllm.linear_e4m3.default, args, test_utils=("test_faketensor", "test_autograd_registration"))
    compiled = torch.compile(linear_e4m3, fullgraph=True, backend="aot_eager")(**g, act="silu", gated=True)
    assert_same(compiled.view(torch.uint8), linear_e4m3(**g, act="silu", gated=True).view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device):
    x, w = torch.zeros(3, 32, device=device).to(FP8), torch.zeros(48, 32, device=device).to(FP8)
    one, rows = torch.ones(1, device=device), torch.ones(3, device=device)
    op = torch.ops.pyllm.linear_e4m3
    for args, message in (
        ((x.half(), w.half(), one, None, None, None, -1, False), "x is float16, expected bfloat16 or float8_e4m3fn"),
        ((x, w, one, None, one, None, -1, False), "weight_scale ?is missing, expected one with float8_e4m3fn"),
        ((x.bfloat16(), w.bfloat16(), one, None, one, None, -1, False), "x_scale ?is given, expected none with bfloat16"),
        ((x, w, one, None, one, one, 0, True), r"weight ?\.size\(0\) is 48, expected a multiple of 32 with gated"),
        ((x, w[:32], one, None, one, one, -1, True), "act ?is -1, expected 0 to 3 with gated"),
        ((x, w, rows, None, one, one, -1, False), r"out_scale ?\.size\(0\) is 3, expected 1"),
        ((x, w, one.half(), None, one, one, -1, False), "out_scale is float16, expected float32"),
        ((x, w, one, rows, one, one, -1, False), "bias is float32|bias ?.size"),
        ((x, w, one, None, rows[:2], one, -1, False), r"x_scale ?\.size\(0\) is 2, expected 1 or M=3"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=f"linear_e4m3: {message}"):
            op(*args)
    with pytest.raises(ValueError, match="linear_e4m3: act is 'tanh', expected None or one of"):
        linear_e4m3(x, w, one, x_scale=one, weight_scale=one, act="tanh")
