from __future__ import annotations

import pytest
import torch

from pyllm.ops.norm import quantize_fp8
from tests.norm.rows import CUDA, DTYPES, WIDTHS
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import FP8, padded_rows, poison_allocator

BF16, FP16, FP32 = DTYPES
MODES = ("token", "static", "tensor", "group")
BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def values(T: int, N: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Rows and columns of very different size, one row of zeros, one element that saturates the static scale."""
    x = torch.randn(T, N) * torch.logspace(-3, 2, max(T, 1))[:T, None] * torch.logspace(1, -1, N)
    if T > 1:
        x[1] = 0
    if T > 2:
        x[2, -1] = -3000
    return x.to(dtype).to(device)


def static(mode: str, device: torch.device | str) -> torch.Tensor | None:
    return torch.tensor([0.37], device=device) if mode == "static" else None


def check_exact(x: torch.Tensor, mode: str) -> None:
    """Against fp64, on the CPU."""
    T, N = x.shape
    q, scale = quantize_fp8(x, mode, static(mode, "cpu"))
    want = x.double()
    per_element = {
        "token": lambda: want.abs().amax(1, keepdim=True).expand(T, N),
        "tensor": lambda: (want.abs().max() if T else want.new_zeros(())).expand(T, N),
        "group": lambda: torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in want.split(128, 1)], 1),
        "static": lambda: want.new_tensor(0.37 * 448).expand(T, N),
    }[mode]()
    exact_scale = (per_element / 448).clamp(min=1e-10)
    used = scale.double()
    if mode == "token":
        used = used[:, None]
    elif mode == "group":
        used = used.repeat_interleave(128, 1)[:, :N]
    # One fp32 division; 1e-10 and 0.37 are themselves rounded to fp32.
    assert_close(used.expand(T, N), exact_scale, rtol=2 * 2.0**-24, what=f"{mode} scale")
    units = want / used
    # 1 / scale and the product are rounded to fp32 (2 * 2^-24), the result to e4m3: u, or half its smallest step 2^-9.
    u = EPS[FP8]
    assert_close(q.float(), units.clamp(-448, 448), rtol=u + 4 * 2.0**-24, atol=2.0**-10 * (1 + 2.0**-20), what=f"{mode} q")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("N", [8, 128, 200, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference(mode, N, dtype):
    for T in (0, 1, 4):
        check_exact(values(T, N, dtype), mode)


@BOTH
def test_static_scale_is_copied(device):
    given = static("static", device)
    for T in (0, 3):
        _, scale = quantize_fp8(values(T, 16, BF16, device), "static", given)
        assert_same(scale, given)
        assert scale.data_ptr() != given.data_ptr()


@BOTH
def test_empty_tensor_scale(device):
    q, scale = quantize_fp8(values(0, 16, BF16, device), "tensor")
    assert q.shape == (0, 16)
    assert_same(scale, torch.tensor([1e-10]))


@BOTH
@pytest.mark.parametrize("mode", MODES)
def test_not_finite(mode, device):
    """NaN is not a maximum and stays NaN; an infinity makes its scale infinite, its group 0 and itself NaN."""
    x = torch.ones(2, 128, dtype=BF16, device=device)
    x[0, 5] = float("nan")
    q, scale = quantize_fp8(x, mode, static(mode, device))
    assert q.float().isnan().nonzero().tolist() == [[0, 5]] and not scale.isnan().any()
    x[0, 7] = -float("inf")
    q, scale = quantize_fp8(x, mode, static(mode, device))
    if mode == "static":
        assert q[0, 7].float().item() == -448
    else:
        assert q[0].float().isnan().nonzero().flatten().tolist() == [5, 7] and q[0, 6].float().item() == 0 and scale.isinf().any()


BAD = [
    ("x", dict(x=torch.zeros(8, dtype=BF16)), "has 1 dimensions, expected 2"),
    ("x", dict(x=torch.zeros(4, 16, dtype=torch.int32)), "is int32"),
    ("x", dict(x=torch.zeros(4, 20, dtype=BF16)), r"\.size\(1\) is 20, expected a multiple of 8"),
    ("x", dict(x=torch.zeros(4, 32776, dtype=BF16)), r"\.size\(1\) is 32776"),
    ("x", dict(x=torch.zeros(4, 20, dtype=BF16)[:, :16]), r"\.stride\(0\) is 20 elements, expected a multiple of 8"),
    ("mode", dict(mode="row"), "is 'row', expected one of token, static, tensor, group"),
    ("scale", dict(mode="static"), "is missing"),
    ("scale", dict(scale=torch.ones(1)), "is given"),
    ("scale", dict(mode="static", scale=torch.ones(1, 1)), "has 2 dimensions, expected 1"),
]


@pytest.mark.parametrize(("argument", "changes", "message"), BAD, ids=[f"{a}-{i}" for i, (a, _, _) in enumerate(BAD)])
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(argument, changes, message, device):
    given = {"x": torch.zeros(4, 16, dtype=BF16), "mode": "token"} | changes
    for name, v in given.items():
        if isinstance(v, torch.Tensor):
            given[name] = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device)
    with pytest.raises((ValueError, RuntimeError), match=f"quantize_fp8: {argument} .*{message}"):
        quantize_fp8(**given)


@BOTH
@pytest.mark.parametrize("mode", MODES)
def test_opcheck_and_compile(mode, device):
    x, scale = values(4, 200, BF16, device), static(mode, device)
    number = {"token": 1, "static": 2, "tensor": 3, "group": 4}[mode]
    torch.library.opcheck(torch.ops.pyllm.quantize_fp8.default, (x, number, scale))
    got = torch.compile(quantize_fp8, fullgraph=True, backend="aot_eager")(x, mode, scale)
    for g, w in zip(got, quantize_fp8(x, mode, scale), strict=True):
        assert_same(g, w)


def check_kernel(T: int, N: int, dtype: torch.dtype, mode: str) -> None:
    """The kernel has the reference's bits."""
    x = values(T, N, dtype)
    want = quantize_fp8(x, mode, static(mode, "cpu"))
    rows, intact = padded_rows(x.to(CUDA))
    poison_allocator((T, N), FP8, CUDA)
    poison_allocator(want[1].shape, FP32, CUDA)
    poison_allocator((2048,), FP32, CUDA)  # the scratch of mode tensor
    got = quantize_fp8(rows, mode, static(mode, CUDA))
    intact()
    assert_same(got[1], want[1], f"{mode} {T}x{N} {dtype} scale")
    assert_same(got[0], want[0], f"{mode} {T}x{N} {dtype} q")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel(mode, N, dtype):
    for T in (0, 1, 3, 70):
        check_kernel(T, N, dtype, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("N", [64, 1032, 4096, 20480])
def test_many_rows(mode, N):
    """The layout for many rows; with N=1032, 64 threads, also beyond the 2048 CTAs that the first pass of mode tensor may have."""
    check_kernel(3000, N, BF16, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("T", [1, 7, 3000])
def test_graph_and_chain(mode, T):
    """The op right behind the kernel that writes its input, in a graph, replayed with other inputs; repeats have the same bits."""
    source = values(T, 4096, BF16, CUDA)
    x, scale = torch.zeros_like(source), static(mode, CUDA)
    weight = torch.ones(4096, dtype=BF16, device=CUDA)

    def chain() -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = torch.ops.pyllm.rms_norm(x, weight, 1e-5)
        return quantize_fp8(normed, mode, scale)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, used = chain()
    for factor in (1.0, -3.0):
        x.copy_(source * factor)
        normed, _ = torch.ops.pyllm.rms_norm(x, weight, 1e-5)
        torch.cuda.synchronize()
        want = quantize_fp8(normed, mode, scale)
        for _ in range(3):
            graph.replay()
            assert_same(q, want[0])
            assert_same(used, want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_far_rows(mode):
    """Offsets beyond 2^31 elements: the last rows against the reference, the first ones for the scale of mode tensor."""
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs a GPU with 20 GiB free")
    N, T = 32768, 2**16 + 3
    x = torch.zeros(T, N, dtype=BF16, device=CUDA)
    x[-2:].normal_()
    q, scale = quantize_fp8(x, mode, static(mode, CUDA))
    want_q, want_scale = quantize_fp8(x[-2:].cpu(), mode, static(mode, "cpu"))
    assert_same(q[-2:], want_q)
    assert_same(scale[-2:] if mode in ("token", "group") else scale, want_scale)
    assert not q[:-2].view(torch.uint8).any()


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [-20, 0, 127])
def test_scale_is_the_rounded_quotient(exponent):
    """absmax / 448 to the bit for all 2^23 mantissas; the kernel gets there without a division."""
    T = 2**23
    absmax = ((exponent + 127) * 2**23 + torch.arange(T, dtype=torch.int32, device=CUDA)).view(torch.float32)
    x = torch.zeros(T, 8, device=CUDA)
    x[:, 3] = -absmax
    assert_same(quantize_fp8(x, "token")[1], (absmax.double() / 448).float(), f"2^{exponent}")
