"""softcap: cap * tanh(x / cap)."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.fused import softcap
from tests.fused.formulas import DTYPES, check_chain, check_graph, far_rows, half_step, on_gpu
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows, poison_allocator

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_softcap(got: torch.Tensor, x: torch.Tensor, cap: float) -> None:
    """One output rounding; bf16: hardware tanh, 2^-10.9 relative; else 12 roundings u of fp32. They are worst at y = 0.6, where
    1 - 2 / (1 + e), e = exp(2y), takes over: e is off by 6.4 u (exp2 4 u, its argument 2.4 u), which is 4.2 u of the result; sum 0.9 u,
    reciprocal 1.7 u, difference 1 u; y itself carries 2 roundings, 1.6 u of the result; the product with cap 1 u."""
    want = cap * torch.tanh(x.double() / cap)
    error = 2.0**-10.9 if x.dtype == torch.bfloat16 else 12 * EPS[torch.float32]
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


@every_dtype
@pytest.mark.parametrize("V", [1, 7, 9, 1001])
def test_reference_of_odd_rows(dtype: torch.dtype, V: int) -> None:
    x, intact = padded_rows(normal(5, V, dtype=dtype, scale=20), gap=3, offset=1)
    out = softcap(x, 30.0)
    assert out.is_contiguous()
    assert_softcap(out, x, 30.0)
    intact()


ERRORS = [
    (lambda d: (torch.zeros(8, device=d), 1.0), "softcap: x has 1 dimensions, expected 2"),
    (lambda d: (torch.zeros(2, 8, dtype=torch.int32, device=d), 1.0), "softcap: x is int32"),
    (lambda d: (torch.zeros(2, 0, device=d), 1.0), r"softcap: x .size\(1\) is 0, expected 1 to 134217728"),
    (lambda d: (torch.zeros(1, 1, device=d).expand(1, 2**27 + 1), 1.0), r"softcap: x .stride\(1\) is 0, expected 1"),
    (lambda d: (torch.zeros(2, 18, device=d)[:, ::2], 1.0), r"softcap: x .stride\(1\) is 2, expected 1"),
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
@pytest.mark.parametrize("V", [16, 33])
def test_opcheck_and_compile(device: str, V: int) -> None:
    x = normal(3, V, dtype=torch.float16, device=device)
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


# Rows end to end (one vector body, one scalar tail), of fewer elements than a vector, and of real vocabularies.
ODD = [(1, 1), (1, 7), (3, 1), (5, 3), (7, 9), (1, 50257), (300, 32001), (90, 50257)]


@pytest.mark.gpu
@every_dtype
def test_kernel_odd_rows(dtype: torch.dtype) -> None:
    for T, V in ODD:
        x = normal(T, V, dtype=dtype, device="cuda", scale=20)
        assert_softcap(on_gpu(lambda y: softcap(y, 30.0), x), x, 30.0)


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize(("gap", "offset"), [(0, 1), (3, 0), (1, 1), (47, 3), (8, 8)])
def test_kernel_any_alignment(dtype: torch.dtype, gap: int, offset: int) -> None:
    """Rows that start at every element of a 16-byte vector, NaN around them; widths of every remainder."""
    sizes = [(9, V) for V in range(1, 26)] + [(17, 1000), (33, 5003)] + ([(200, 50257)] if gap == 47 else [])
    for T, V in sizes:
        x, intact = padded_rows(normal(T, V, dtype=dtype, device="cuda", scale=20), gap=gap, offset=offset)
        poison_allocator(x.shape, dtype, "cuda")
        out = softcap(x, 30.0)
        assert_softcap(out, x, 30.0)
        assert_same(out, softcap(x.contiguous(), 30.0), "rows end to end")
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
    for V in (4096, 4099):
        x = far_rows(V, torch.float16)
        assert_softcap(softcap(x, 2.0), x, 2.0)
        del x
