"""act: the four activations, element by element."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.fused import ACTS, act
from tests.fused.formulas import (
    DTYPES,
    FLUSH,
    HALVES,
    activation64,
    activation_error,
    check_chain,
    check_graph,
    far_rows,
    half_step,
    on_gpu,
)
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows

every_act = pytest.mark.parametrize("name", ACTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_act(got: torch.Tensor, x: torch.Tensor, name: str) -> None:
    """One rounding (u relative, half a subnormal step absolute) of a value that is off by activation_error and may be flushed."""
    want = activation64(x, name)
    atol = want.abs() * (activation_error(x, name, x.dtype).to(want.device) * 1.01) + FLUSH + half_step(x.dtype)
    assert got.dtype == x.dtype
    assert_close(got, want, rtol=EPS[x.dtype], atol=atol, what=f"act {name} {x.dtype}")


def special_rows(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    inf = float("inf")
    values = [0.0, -0.0, inf, -inf, float("nan"), 1e-6, -1e-6, 3.0, -3.0, -10.0, -30.0, -80.0, 80.0, -86.0, -100.0, 100.0]
    return torch.tensor([values], dtype=dtype, device=device)


def check_special(device: str, dtype: torch.dtype, name: str) -> None:
    x = special_rows(dtype, device)
    got = act(x, name)[0].cpu()
    assert got[2] == float("inf")
    assert got[3] == 0.0
    assert got[4].isnan()
    finite = torch.isfinite(x)
    assert_act(act(torch.where(finite, x, torch.zeros_like(x)), name), torch.where(finite, x, torch.zeros_like(x)), name)


@every_act
@every_dtype
def test_reference(name: str, dtype: torch.dtype) -> None:
    x = normal(17, 264, dtype=dtype, scale=4)
    assert_act(act(x, name), x, name)
    check_special("cpu", dtype, name)


def test_strided_rows() -> None:
    x, intact = padded_rows(normal(5, 64, dtype=torch.bfloat16))
    out = act(x, "silu")
    assert out.is_contiguous()
    assert_same(out, act(x.contiguous(), "silu"))
    intact()


ERRORS = [
    (lambda d: (torch.zeros(2, 3, 8, device=d), 0), "act: x has 3 dimensions, expected 2"),
    (lambda d: (torch.zeros(2, 8, dtype=torch.int32, device=d), 0), "act: x is int32, expected bfloat16 or float16 or float32"),
    (lambda d: (torch.zeros(2, 12, device=d), 0), r"act: x .size\(1\) is 12, expected a multiple of 8"),
    (lambda d: (torch.zeros(2, 0, device=d), 0), r"act: x .size\(1\) is 0, expected a multiple of 8, at least 8"),
    (lambda d: (torch.zeros(2, 16, device=d)[:, ::2], 0), r"act: x .stride\(1\) is 2, expected 1"),
    (lambda d: (torch.zeros(2, 17, device=d)[:, :16], 0), r"act: x .stride\(0\) is 17 elements, expected a multiple of 4"),
    (lambda d: (torch.zeros(2, 8, device=d), 4), "act: act is 4, expected 0 to 3"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device: str, make, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.pyllm.act(*make(device))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="act: act is 'swish', expected one of silu, gelu, gelu_tanh, relu2"):
        act(torch.zeros(1, 8), "swish")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_and_compile(device: str) -> None:
    x = normal(3, 16, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.pyllm.act.default, (x, 1))
    compiled = torch.compile(lambda y: act(y, "gelu"), fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), act(x, "gelu"))


@pytest.mark.gpu
@every_act
@every_dtype
def test_kernel(name: str, dtype: torch.dtype) -> None:
    for T, F in ((0, 8), (1, 8), (1, 14336), (3, 24), (257, 4096), (2100, 4104)):
        x = normal(T, F, dtype=dtype, device="cuda", scale=4)
        assert_act(on_gpu(lambda y: act(y, name), x), x, name)
    check_special("cuda", dtype, name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@every_act
def test_every_value_of_16_bits(name: str, dtype: torch.dtype) -> None:
    """All finite bf16 and fp16 numbers whose result is finite too."""
    x = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype).view(1, -1)
    fine = torch.isfinite(x) & (activation64(x, name).abs() <= torch.finfo(dtype).max)
    x = torch.where(fine, x, torch.zeros_like(x))
    assert_act(act(x, name), x, name)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [3, 1000])
def test_kernel_strided(T: int) -> None:
    x, intact = padded_rows(normal(T, 4096, dtype=torch.bfloat16, device="cuda"))
    assert_act(on_gpu(lambda y: act(y, "silu"), x), x, "silu")
    intact()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3000])
def test_graph_and_chain(T: int) -> None:
    x = normal(T, 4096, dtype=torch.bfloat16, device="cuda")
    check_chain(lambda y: act(y, "silu"), x)
    check_graph(lambda y: act(y, "gelu"), x, normal(T, 4096, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_31_bits() -> None:
    x = far_rows(4096, torch.bfloat16)
    assert_act(act(x, "silu"), x, "silu")


@pytest.mark.gpu
def test_unaligned_base() -> None:
    with pytest.raises(RuntimeError, match="act: x starts at an address that is not a multiple of 16 bytes"):
        act(torch.zeros(33, dtype=torch.bfloat16, device="cuda")[1:].view(2, 16), "silu")
