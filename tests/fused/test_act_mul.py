"""act_mul: activation of the gate half times the up half, one rounding."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.fused import ACTS, act_mul
from tests.fused.formulas import DTYPES, FLUSH, activation64, activation_error, check_graph, far_rows, half_step, on_gpu
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows

every_act = pytest.mark.parametrize("name", ACTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_act_mul(got: torch.Tensor, x: torch.Tensor, name: str) -> None:
    """One output rounding of f(gate) * up, where f is off by activation_error (and may be flushed) and the product by 2^-24."""
    gate, up = x.double().chunk(2, dim=1)
    want = activation64(gate, name) * up
    error = activation_error(gate, name, x.dtype).to(want.device) * 1.01 + EPS[torch.float32]
    atol = want.abs() * error + FLUSH * up.abs() + half_step(x.dtype)
    assert got.dtype == x.dtype and got.is_contiguous()
    assert_close(got, want, rtol=EPS[x.dtype], atol=atol, what=f"act_mul {name} {x.dtype}")


def check_special(device: str, name: str) -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([[-inf, -inf, inf, nan, 1.0, 0.0, -200.0, inf]])
    up = torch.tensor([[2.0, inf, -1.0, 1.0, nan, 5.0, 3.0, inf]])
    got = act_mul(torch.cat((gate, up), 1).bfloat16().to(device), name)[0].tolist()
    assert got[0] == 0.0 and got[2] == -inf and got[5] == 0.0 and got[6] == 0.0 and got[7] == inf
    assert all(v != v for v in (got[1], got[3], got[4]))


@every_act
@every_dtype
def test_reference(name: str, dtype: torch.dtype) -> None:
    x = normal(17, 528, dtype=dtype, scale=3)
    assert_act_mul(act_mul(x, name), x, name)
    check_special("cpu", name)


ERRORS = [
    (lambda d: (torch.zeros(16, device=d), 0), "act_mul: x has 1 dimensions, expected 2"),
    (lambda d: (torch.zeros(2, 16, dtype=torch.float64, device=d), 0), "act_mul: x is float64|act_mul: x is an unsupported dtype"),
    (lambda d: (torch.zeros(2, 24, device=d), 0), r"act_mul: x .size\(1\) is 24, expected a multiple of 16"),
    (lambda d: (torch.zeros(2, 18, device=d)[:, :16], 0), r"act_mul: x .stride\(0\) is 18 elements, expected a multiple of 4"),
    (lambda d: (torch.zeros(2, 16, device=d), -1), "act_mul: act is -1, expected 0 to 3"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device: str, make, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.pyllm.act_mul(*make(device))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="act_mul: act is 'geglu', expected one of"):
        act_mul(torch.zeros(1, 16), "geglu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_and_compile(device: str) -> None:
    x = normal(3, 32, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.pyllm.act_mul.default, (x, 0))
    compiled = torch.compile(lambda y: act_mul(y, "silu"), fullgraph=True, backend="aot_eager")
    assert_same(compiled(x), act_mul(x, "silu"))


@pytest.mark.gpu
@every_act
@every_dtype
def test_kernel(name: str, dtype: torch.dtype) -> None:
    for T, F in ((0, 8), (1, 8), (1, 14336), (5, 24), (129, 4096), (1200, 2056)):
        x = normal(T, 2 * F, dtype=dtype, device="cuda", scale=3)
        assert_act_mul(on_gpu(lambda y: act_mul(y, name), x), x, name)
    check_special("cuda", name)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "F"), [(1, 8), (3, 1000), (3000, 8), (3000, 1000)])
def test_kernel_strided(T: int, F: int) -> None:
    x, intact = padded_rows(normal(T, 2 * F, dtype=torch.bfloat16, device="cuda"), gap=24)
    assert_act_mul(on_gpu(lambda y: act_mul(y, "silu"), x), x, "silu")
    intact()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 3000])
def test_graph(T: int) -> None:
    x, changed = (normal(T, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    check_graph(lambda y: act_mul(y, "silu"), x, changed)


@pytest.mark.gpu
def test_two_in_a_row_in_a_graph() -> None:
    """The second launch reads what the first one writes."""
    x = normal(2000, 8192, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = act_mul(x, "silu")
        second = act_mul(first, "silu")
    first.fill_(float("nan"))
    second.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_act_mul(second, first, "silu")


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_31_bits() -> None:
    x = far_rows(8192, torch.bfloat16)
    assert_act_mul(act_mul(x, "silu"), x, "silu")
