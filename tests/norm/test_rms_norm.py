from __future__ import annotations

import pytest
import torch

from pyllm.ops.norm import rms_norm
from tests.norm import rows
from tests.norm.rows import CUDA, DTYPES, EPSILON, WIDTHS
from tests.support.compare import assert_same

BF16, FP16, FP32 = DTYPES


def norm(x, weight, bias, residual, quant, scale):  # the shape that tests/norm/rows.py calls
    return rms_norm(x, weight, EPSILON, residual, quant, scale)


@pytest.mark.parametrize("T", [0, 1, 5])
@pytest.mark.parametrize("N", [8, 264, 4096])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP32, FP32)])
def test_reference(T, N, dtype, weight_dtype):
    rows.check_norm(norm, rows.rms64, T, N, dtype, weight_dtype, "cpu")


def test_zeros_and_nan_rows():
    x = torch.zeros(3, 16, dtype=BF16)
    x[1, 3] = float("nan")
    q, scale = rms_norm(x, torch.ones(16, dtype=BF16), EPSILON, quant="token")
    assert q.float()[0].eq(0).all() and q.float()[1].isnan().all() and q.float()[2].eq(0).all()
    assert_same(scale, torch.full((3,), 1e-10))


def base(**changes):
    kind = {"x": torch.zeros(4, 16, dtype=BF16), "weight": torch.ones(16, dtype=BF16), "eps": EPSILON}
    return kind | changes


BAD = [
    ("x", {"x": torch.zeros(2, 4, 16, dtype=BF16)}, "has 3 dimensions"),
    ("x", {"x": torch.zeros(4, 16, dtype=torch.float64)}, "is (float64|an unsupported dtype)"),
    ("x", {"x": torch.zeros(4, 12, dtype=BF16)}, r"\.size\(1\) is 12, expected a multiple of 8"),
    ("x", {"x": torch.zeros(4, 32776, dtype=BF16)}, r"\.size\(1\) is 32776"),
    ("x", {"x": torch.zeros(16, 16, dtype=BF16).t()}, r"\.stride\(1\) is 16, expected 1"),
    ("x", {"x": torch.zeros(4, 20, dtype=BF16)[:, :16]}, r"\.stride\(0\) is 20 elements, expected a multiple of 8"),
    ("weight", {"weight": torch.ones(24, dtype=BF16)}, r"\.size\(0\) is 24, expected N=16"),
    ("weight", {"weight": torch.ones(32, dtype=BF16)[::2]}, "is not contiguous"),
    ("weight", {"weight": torch.ones(16, dtype=FP16)}, "is float16, expected bfloat16 like x or float32"),
    ("residual", {"residual": torch.zeros(5, 16, dtype=BF16)}, r"\.size\(0\) is 5, expected T=4"),
    ("residual", {"residual": torch.zeros(4, 16, dtype=FP16)}, "is float16, expected bfloat16 like x"),
    ("residual", {"residual": torch.zeros(1, 16, dtype=BF16).expand(4, 16)}, r"\.stride\(0\) is 0, expected at least N=16"),
    ("eps", {"eps": -1e-5}, "is -1e-05, expected finite and at least 0"),
    ("eps", {"eps": float("nan")}, "is nan, expected finite"),
    ("quant", {"quant": "group"}, "is 'group', expected None, 'token' or 'static'"),
    ("scale", {"quant": "static"}, "is missing"),
    ("scale", {"scale": torch.ones(1)}, "is given"),
    ("scale", {"quant": "static", "scale": torch.ones(2)}, r"\.size\(0\) is 2, expected 1"),
    ("scale", {"quant": "static", "scale": torch.ones(1, dtype=BF16)}, "is bfloat16, expected float32"),
]


def move(v, device):
    """The same strides on another device."""
    if not isinstance(v, torch.Tensor):
        return v
    return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device)


@pytest.mark.parametrize(("argument", "changes", "message"), BAD, ids=[f"{a}-{i}" for i, (a, _, _) in enumerate(BAD)])
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(argument, changes, message, device):
    given = {k: move(v, device) for k, v in base(**changes).items()}
    with pytest.raises((ValueError, RuntimeError), match=f"rms_norm: {argument} .*{message}"):
        rms_norm(**given)


def op_arguments(device):
    x, weight, _, residual = rows.inputs(3, 64, BF16, BF16, device)
    yield x, weight, EPSILON
    yield x, weight.float(), EPSILON, residual, 1
    yield x, weight, EPSILON, residual, 2, torch.ones(1, device=device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck(device):
    for arguments in op_arguments(device):
        torch.library.opcheck(torch.ops.pyllm.rms_norm.default, arguments)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compile(device):
    x, weight, bias, residual = rows.inputs(3, 64, BF16, BF16, device)
    want_residual = residual.clone()
    want = norm(x, weight, bias, want_residual, "token", None)
    got = torch.compile(norm, fullgraph=True, backend="aot_eager")(x, weight, bias, residual, "token", None)
    assert_same(got[0], want[0])
    assert_same(got[1], want[1])
    assert_same(residual, want_residual)


@pytest.mark.gpu
@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32)])
def test_kernel(N, dtype, weight_dtype):
    for T in (0, 1, 3, 70):
        rows.check_norm(norm, rows.rms64, T, N, dtype, weight_dtype, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [64, 1032, 4096, 20480])
@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
def test_many_rows(N, weight_dtype):
    """More than four rows per SM: fewer threads per row, each with more vectors."""
    rows.check_norm(norm, rows.rms64, 2500, N, BF16, weight_dtype, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [64, 1024, 1032, 2568, 4096, 8192, 14336, 32768])
def test_batch_invariance(N):
    rows.check_invariance(norm, N, BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_batch_invariance_of_dtypes(dtype):
    rows.check_invariance(norm, 4096, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [576, 4096, 8192])
def test_graph_and_chain(N):
    rows.check_graph_and_chain(norm, N)


@pytest.mark.gpu
def test_far_rows():
    rows.check_far_rows(norm)


@pytest.mark.gpu
def test_unaligned_base():
    buffer = torch.zeros(4, 24, dtype=BF16, device=CUDA)
    with pytest.raises(RuntimeError, match="rms_norm: x starts at an address that is not a multiple of 16 bytes"):
        rms_norm(buffer[:, 1:17], torch.ones(16, dtype=BF16, device=CUDA), EPSILON)
    with pytest.raises(RuntimeError, match="rms_norm: weight starts at an address that is not a multiple of 16 bytes"):
        rms_norm(buffer[:, :16], torch.ones(17, dtype=BF16, device=CUDA)[1:], EPSILON)
