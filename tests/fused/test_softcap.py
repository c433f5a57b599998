"""softcap: cap * tanh(x / cap)."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.fused import softcap
from tests.fused.formulas import DTYPES, check_chain, check_graph, far_rows, half_step, on_gpu
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_softcap(got: torch.Tensor, x: torch.Tensor, cap: float) -> None:
    """One output rounding; bf16: hardware tanh, 2^-10.9 relative; else tanh of a few ulp, whose argument carries two roundings (relative
    change of tanh(y) at most that of y): 8 roundings of fp32 in all."""
    want = cap * torch.tanh(x.double() / cap)
    error = 2.0**-10.9 if x.dtype == torch.bfloat16 else 8 * EPS[torch.float32]
    assert got.dtype == x.dtype
    assert_close(got, want, rtol=EPS[x.dtype] + error, atol=half_step(x.dtype) + 2.0**-125, what=f"softcap {x.dtype}")


def check_special(device: str, dtype: torch.dtype) -> None:
    inf = float("inf")
    x = torch.tensor([[inf, -inf, float("nan"), 0.0, 1e4, -1e4, 1e-5, 30.0]], dtype=dtype, device=device)
    got = softcap(x, 30.0)[0].cpu()
    assert got[:2].tolist() == [30.0, -30.0] and got[2].isnan() and got[3] == 0.0
    assert got[4:6].tolist() == [30.0, -30.0]


@every_dtype
@pytest.mark.parametrize("cap", [30.0, 0.5])
def test_reference(dtype: torch.dtype, cap: float) -> None:
    x = normal(9, 1000, dtype=dtype, scale=20)
    assert_softcap(softcap(x, cap), x, cap)
    check_special("cpu", dtype)


ERRORS = [
    (lambda d: (torch.zeros(8, device=d), 1.0), "softcap: x has 1 dimensions, expected 2"),
    (lambda d: (torch.zeros(2, 8, dtype=torch.int32, device=d), 1.0), "softcap: x is int32"),
    (lambda d: (torch.zeros(2, 9, device=d), 1.0), r"softcap: x .size\(1\) is 9, expected a multiple of 8"),
    (lambda d: (torch.zeros(2, 8, device=d), 0.0), "softcap: cap is 0, expected finite and > 0"),
    (lambda d: (torch.zeros(2, 8, device=d), float("inf")), "softcap: cap is inf, expected finite and > 0"),
    (lambda d: (torch.zeros(2, 8, device=d), float("nan")), "softcap: cap is nan, expected finite and > 0"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device: str, make, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.pyllm.softcap(*make(device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_and_compile(device: str) -> None:
    x = normal(3, 16, dtype=torch.float16, device=device)
    torch.library.opcheck(torch.ops.pyllm.softcap.default, (x, 30.0))
    compiled = torch.compile(lambda y: softcap(y, 30.0), fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), softcap(x, 30.0))


@pytest.mark.gpu
@every_dtype
def test_kernel(dtype: torch.dtype) -> None:
    for T, V in ((0, 8), (1, 8), (1, 128256), (7, 1000), (300, 32000)):
        x = normal(T, V, dtype=dtype, device="cuda", scale=20)
        assert_softcap(on_gpu(lambda y: softcap(y, 30.0), x), x, 30.0)
    check_special("cuda", dtype)
    x, intact = padded_rows(normal(50, 2000, dtype=dtype, device="cuda", scale=20))
    assert_softcap(softcap(x, 30.0), x, 30.0)
    intact()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 200])
def test_graph_and_chain(T: int) -> None:
    x, changed = (normal(T, 32000, dtype=torch.bfloat16, device="cuda", scale=20) for _ in range(2))
    check_chain(lambda y: softcap(y, 30.0), x)
    check_graph(lambda y: softcap(y, 30.0), x, changed)


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_31_bits() -> None:
    x = far_rows(4096, torch.float16)
    assert_softcap(softcap(x, 2.0), x, 2.0)
