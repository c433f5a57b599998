"""act_mul_fp8: the bits of act_mul and quantize_fp8 one after the other, on the CPU and on the GPU."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.fused import ACTS, act_mul, act_mul_fp8
from pyllm.ops.norm import quantize_fp8
from tests.fused.formulas import DTYPES, activation64, activation_error, check_graph, far_rows
from tests.support.compare import EPS, assert_same
from tests.support.generate import normal, padded_rows, poison_allocator

E4M3 = torch.float8_e4m3fn
every_act = pytest.mark.parametrize("name", ACTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def separate(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_fp8(act_mul(x, name), "token")


def assert_pair(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], what: str) -> None:
    assert got[0].dtype == E4M3 and got[1].dtype == torch.float32 and got[0].is_contiguous()
    assert_same(got[0].view(torch.uint8), want[0].view(torch.uint8), f"{what}, values")
    assert_same(got[1], want[1], f"{what}, scales")


def on_gpu(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Into memory that was NaN before; twice with the same bits; each row alone gives the bits it has in the batch."""
    poison_allocator((x.shape[0], x.shape[1] // 2), E4M3, x.device)
    poison_allocator((x.shape[0],), torch.float32, x.device)
    out = act_mul_fp8(x, name)
    assert_pair(act_mul_fp8(x, name), out, "second run")
    for t in {0, x.shape[0] // 2, x.shape[0] - 1} if x.shape[0] else ():
        assert_pair(act_mul_fp8(x[t : t + 1], name), (out[0][t : t + 1], out[1][t : t + 1]), f"row {t} alone")
    return out


def special(device: str) -> torch.Tensor:
    """Rows with zeros, NaN, infinities of either half, values beyond e4m3's range and below its smallest."""
    inf, nan = float("inf"), float("nan")
    gate = [[0.0] * 8, [nan, 1, 2, 3, 4, 5, 6, 7], [inf, -inf, 1, 0, -1, 2, 3, 4], [300.0] * 8, [1e-30] * 8]
    up = [[0.0] * 8, [1, nan, 1, 1, 1, 1, 1, 1], [1, 1, inf, 1, 1, 1, 1, 1], [1e3, 1, 2, 3, 4, 5, 6, 7], [1e-6] * 8]
    return torch.cat((torch.tensor(gate), torch.tensor(up)), 1).bfloat16().to(device)


@every_act
@every_dtype
def test_reference(name: str, dtype: torch.dtype) -> None:
    """Against fp64: y is rounded once to dtype (u), to e4m3 with 3 bits (2^-4, and half the smallest step 2^-10 of the scale)."""
    x = normal(17, 528, dtype=dtype, scale=3)
    q, scale = act_mul_fp8(x, name)
    gate, up = x.double().chunk(2, dim=1)
    want = activation64(gate, name) * up
    error = (2.0**-4 + EPS[dtype] + activation_error(gate, name, dtype) * 1.01 + 2.0**-20) * want.abs() + 2.0**-10 * scale.double()[:, None]
    got = q.double() * scale.double()[:, None]
    assert ((got - want).abs() <= error).all()
    assert q.float().abs().amax(1).eq(448).all(), "the largest of each row takes the largest e4m3 value"
    assert_pair((q, scale), separate(x, name), "separate ops")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@every_act
@every_dtype
def test_a_given_scale(name: str, dtype: torch.dtype, device: str) -> None:
    """The bits of act_mul and a static quantize_fp8, some values past the largest; the scale is handed on."""
    scale = torch.tensor([0.037], device=device)
    for T, F in ((0, 8), (1, 8), (1, 14336), (5, 24), (67, 14336), (300, 2056)) if device == "cuda" else ((17, 528),):
        x = normal(T, 2 * F, dtype=dtype, device=device, scale=9)
        poison_allocator((T, F), E4M3, x.device)
        q, given = act_mul_fp8(x, name, scale)
        assert given is scale and q.is_contiguous()
        assert_same(q.view(torch.uint8), quantize_fp8(act_mul(x, name), "static", scale)[0].view(torch.uint8), f"T={T} F={F}")
    x = special(device).to(dtype)
    assert_same(act_mul_fp8(x, name, scale)[0].view(torch.uint8), quantize_fp8(act_mul(x, name), "static", scale)[0].view(torch.uint8))


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bad_scales(device: str) -> None:
    x = torch.zeros(2, 16, device=device)
    for scale in (torch.ones(2, device=device), torch.ones(1, dtype=torch.float16, device=device), torch.ones((), device=device)):
        with pytest.raises((ValueError, RuntimeError), match="act_mul_fp8_static: scale.*expected"):
            torch.ops.pyllm.act_mul_fp8_static(x, 0, scale)


ERRORS = [
    (lambda d: (torch.zeros(16, device=d), 0), "act_mul_fp8: x has 1 dimensions, expected 2"),
    (lambda d: (torch.zeros(2, 24, device=d), 0), r"act_mul_fp8: x .size\(1\) is 24, expected a multiple of 16"),
    (lambda d: (torch.zeros(2, 18, device=d)[:, :16], 0), r"act_mul_fp8: x .stride\(0\) is 18 elements, expected a multiple of 4"),
    (lambda d: (torch.zeros(1, 65552, device=d), 0), r"act_mul_fp8: x .size\(1\) is 65552, expected at most 65536"),
    (lambda d: (torch.zeros(2, 16, device=d), 4), "act_mul_fp8: act is 4, expected 0 to 3"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device: str, make, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.pyllm.act_mul_fp8(*make(device))


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="act_mul_fp8: act is 'geglu', expected one of"):
        act_mul_fp8(torch.zeros(1, 16), "geglu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_opcheck_and_compile(device: str) -> None:
    x = normal(3, 32, dtype=torch.bfloat16, device=device)
    torch.library.opcheck(torch.ops.pyllm.act_mul_fp8.default, (x, 0))
    compiled = torch.compile(lambda y: act_mul_fp8(y, "silu"), fullgraph=True, backend="aot_eager")
    assert_pair(compiled(x), act_mul_fp8(x, "silu"), "compiled")


@pytest.mark.gpu
@every_act
@every_dtype
def test_kernel(name: str, dtype: torch.dtype) -> None:
    for T, F in ((0, 8), (1, 8), (1, 14336), (5, 24), (17, 32768), (67, 14336), (129, 4096), (700, 2056), (300, 14336)):
        x = normal(T, 2 * F, dtype=dtype, device="cuda", scale=3)
        assert_pair(on_gpu(x, name), separate(x, name), f"T={T} F={F}")
    x = special("cuda").to(dtype)
    assert_pair(on_gpu(x, name), separate(x, name), "special values")


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "F"), [(1, 8), (3, 1000), (600, 1000)])
def test_kernel_strided(T: int, F: int) -> None:
    x, intact = padded_rows(normal(T, 2 * F, dtype=torch.bfloat16, device="cuda"), gap=24)
    assert_pair(on_gpu(x, "silu"), separate(x, "silu"), "strided rows")
    intact()


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 64, 600])
def test_graph(T: int) -> None:
    x, changed = (normal(T, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    check_graph(lambda y: act_mul_fp8(y, "silu")[1], x, changed)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 300])
def test_a_graph_waits_for_its_predecessor(T: int) -> None:
    """Behind a kernel that writes x late in the same graph: the launch may start early, its reads may not."""
    x = normal(T, 28672, dtype=torch.bfloat16, device="cuda")
    fresh = torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(x, 1.0, out=fresh)
        got = act_mul_fp8(fresh, "silu")
    fresh.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert_pair(got, separate(x, "silu"), "after a late write")


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_31_bits() -> None:
    x = far_rows(8192, torch.bfloat16)
    assert_pair(act_mul_fp8(x, "silu"), separate(x, "silu"), "far rows")
