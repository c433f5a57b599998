"""skinny_linear: the reference on the CPU, the kernel against fp64 on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm.ops.fused import ACTS, activation
from pyllm.ops.skinny import skinny_linear
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows, poison, poison_allocator
from tests.support.late import check_waits, write_late

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
PLACES = ["cpu", GPU]


def plain(x: Tensor, w: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """fp64 result before the residual, and a bound of its error before the rounding of the result.

    A product of bf16 or fp16 is exact in fp32, and adding K of them in any order errs by at most K 2^-24 sum |x w|. e4m3: the tensor core
    aligns the products of an instruction (32 of K) and its accumulator to the largest and keeps 13 bits below it, at most 8 instructions
    before the sum is moved to fp32: 9 truncations of 2^-13 of at most sum |x w|. Scales, bias and norm: one rounding of fp32 each.
    """
    X, W = x.double(), w.double()
    if (g := given.get("norm_weight")) is not None:
        factor = torch.rsqrt(X.square().mean(1, keepdim=True) + given["eps"])
        X = (X * g.double()).float().to(x.dtype).double()
        y, size = (X @ W.T) * factor, (X.abs() @ W.abs().T) * factor
    else:
        y, size = X @ W.T, X.abs() @ W.abs().T
    unit = (x.shape[1] + 8) * EPS[torch.float32] + (9 * 2.0**-13 if x.dtype == FP8 else 0.0)
    for scale in (given["x_scale"][:, None] if "x_scale" in given else None, given.get("weight_scale")):
        if scale is not None:
            y, size = y * scale.double(), size * scale.double().abs()
    if (bias := given.get("bias")) is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    return y, unit * size


def want(x: Tensor, w: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """fp64 result and absolute bound ahead of the result's rounding: the activations' slopes are at most 1.13 (relu2: 2 |y|), their own
    error below 2^-14 of the result."""
    y, bound = plain(x, w, **given)
    act, up = given.get("act"), None
    if given.get("gated"):
        (y, up), (bound, up_bound) = y.chunk(2, dim=1), bound.chunk(2, dim=1)
    if act is not None:
        slope = 2 * y.abs() + bound if act == "relu2" else 1.13
        y, bound = activation(y, ACTS[act]), bound * slope
        bound = bound + 2.0**-14 * y.abs()
    if up is not None:
        y, bound = y * up, bound * (up.abs() + up_bound) + y.abs() * up_bound
    if cap := given.get("softcap"):
        y = cap * torch.tanh(y / cap)
        bound = bound + 2.0**-20 * y.abs()
    if (residual := given.get("residual")) is not None:
        bound = bound + 2.0**-23 * (y.abs() + residual.double().abs())
        y = y + residual.double()
    return y, bound


def compare(x: Tensor, w: Tensor, device: str, what: str = "", **given: Any) -> Tensor:
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in given.items()}
    y, bound = want(x, w, **given)
    dtype = given.get("dtype", BF16 if x.dtype == FP8 else x.dtype)
    if device == "cuda":
        poison_allocator(y.shape, dtype, device)
    got = skinny_linear(x.to(device), w.to(device), moved.pop("bias", None), **moved)
    assert got.dtype == dtype
    # A result below the normal range is rounded to a multiple of its smallest subnormal.
    assert_close(
        got,
        y,
        rtol=EPS[dtype] * (1 + EPS[dtype]),
        atol=bound * (1 + EPS[dtype]) + torch.finfo(dtype).smallest_normal * EPS[dtype],
        what=what,
    )
    return got


SIZES = [
    (1, 1, 8),
    (3, 24, 40),
    (7, 40, 128),
    (8, 64, 520),
    (9, 1000, 1024),
    (16, 72, 2048),
    (33, 130, 264),
    (63, 96, 1000),
    (64, 257, 512),
]
LARGE = [
    *((1, 3072, 2048), (5, 6144, 4096), (16, 40000, 512), (64, 4096, 1024), (64, 20000, 256), (17, 1280, 8192)),
    *((8, 8200, 1040), (3, 1281, 8208), (4, 4096, 14336), (8, 2056, 4112), (2, 16400, 2032)),
    *((7, 6400, 3600), (12, 7000, 8176), (3, 8192, 3584), (6, 7000, 1040), (5, 1280, 13312), (16, 16384, 2048)),
    *((16, 4096, 4096), (11, 1281, 8208), (9, 8200, 1040), (16, 4100, 14336), (13, 25000, 2064), (12, 33800, 528)),
]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_against_fp64(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    compare(normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP8])
@pytest.mark.parametrize(("m", "n", "k"), LARGE)
def test_large(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    compare(normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), "cuda")


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("out", [BF16, FP16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (3, 100, 1040), (8, 8250, 1024), (9, 72, 272), (16, 4098, 2064), (64, 130, 1040)])
def test_fp8_with_scales(m: int, n: int, k: int, out: torch.dtype, device: str) -> None:
    x, w = normal(m, k, dtype=FP8), normal(n, k, dtype=FP8)
    scales = {"x_scale": normal(m).abs() + 0.1, "weight_scale": normal(n).abs() + 0.1}
    compare(x, w, device, dtype=out, bias=normal(n, dtype=out), **scales)
    compare(x, w, device, dtype=out, weight_scale=scales["weight_scale"])


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("act", [None, *ACTS])
def test_epilogues(act: str | None, gated: bool, device: str) -> None:
    for m, n, k in ((3, 48, 512), (40, 4096, 1024), (16, 20000, 64)):
        x, w, bias = normal(m, k, dtype=BF16), normal(n, k, dtype=BF16, scale=k**-0.5), normal(n, dtype=BF16)
        residual, intact = padded_rows(normal(m, n // 2 if gated else n, dtype=BF16))
        compare(x, w, device, what=f"{m}x{n}x{k}", act=act, gated=gated, bias=bias, residual=residual)
        compare(x, w, device, what=f"{m}x{n}x{k} softcap", act=act, gated=gated, softcap=2.5)
        intact()


@pytest.mark.gpu
@pytest.mark.parametrize("act", [None, *ACTS])
@pytest.mark.parametrize(("m", "n", "k"), [(16, 1281, 2064), (9, 8202, 520), (13, 12300, 1048), (16, 25000, 264)])
def test_epilogues_of_16_rows(m: int, n: int, k: int, act: str | None) -> None:
    """K in halves and whole, one to four blocks of rows for a CTA, columns that are no multiple of four."""
    x, w, bias = normal(m, k, dtype=BF16), normal(n, k, dtype=BF16, scale=k**-0.5), normal(n, dtype=BF16)
    residual, intact = padded_rows(normal(m, n, dtype=BF16))
    compare(x, w, "cuda", act=act, bias=bias, residual=residual)
    compare(x, w, "cuda", what="softcap", act=act, softcap=2.5)
    intact()


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weight_dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 48, 520), (9, 64, 1024), (17, 6144, 512), (64, 4096, 256), (4, 40000, 128), (3, 1280, 4096), (8, 80, 4104)]
)
def test_norm(m: int, n: int, k: int, weight_dtype: torch.dtype, gated: bool, device: str) -> None:
    x, w, g = normal(m, k, dtype=BF16, scale=30.0), normal(n, k, dtype=BF16), normal(k, dtype=weight_dtype)
    x[:, 3] *= 1000  # an outlier as real models have
    x[m // 2] *= 1e-4
    compare(x, w, device, norm_weight=g, eps=1e-5, act="silu" if gated else None, gated=gated)


@pytest.mark.parametrize("device", PLACES)
def test_adversarial_magnitudes(device: str) -> None:
    """Rows and columns of sizes from 2^-60 to 2^60, and sums that cancel: the bound is per element."""
    m, n, k = 13, 80, 1032
    x, w = normal(m, k), normal(n, k)
    x, w = x * torch.exp2(torch.linspace(-60, 60, m))[:, None], w * torch.exp2(torch.linspace(-40, 40, n))[:, None]
    x[:, k // 2 :] = -x[:, : k // 2].flip(1)
    w[:, k // 2 :] = w[:, : k // 2].flip(1)
    compare(x.bfloat16(), w.bfloat16(), device)


@pytest.mark.parametrize("device", PLACES)
def test_special_values_stay_in_their_row_and_column(device: str) -> None:
    x, w = normal(9, 256, dtype=BF16), normal(100, 256, dtype=BF16)
    x[4, 7], w[65, 3], w[80, 200] = float("nan"), float("inf"), float("nan")
    y = skinny_linear(x.to(device), w.to(device)).cpu()
    bad = ~torch.isfinite(y)
    expected = torch.zeros_like(bad)
    expected[4], expected[:, 65], expected[:, 80] = True, True, True
    assert torch.equal(bad, expected)


@pytest.mark.parametrize("device", PLACES)
def test_strided_rows(device: str) -> None:
    x, w = normal(6, 136, dtype=BF16), normal(50, 136, dtype=BF16)
    strided_x, strided_w = padded_rows(x.to(device), gap=16, offset=8)[0], padded_rows(w.to(device), gap=24, offset=16)[0]
    assert_same(skinny_linear(strided_x, strided_w), skinny_linear(x.to(device), w.to(device)))


@pytest.mark.parametrize("device", PLACES)
def test_no_rows(device: str) -> None:
    assert skinny_linear(torch.zeros(0, 64, dtype=BF16, device=device), torch.zeros(8, 64, dtype=BF16, device=device)).shape == (0, 8)


@pytest.mark.gpu
def test_fp8_gated() -> None:
    """Scales of the gate's and the up projection's rows, in batches of one turn and of several."""
    for m, n, k in ((1, 48, 528), (8, 28672, 256), (5, 1296, 8192)):
        x, w = normal(m, k, dtype=FP8), normal(n, k, dtype=FP8)
        scales = {"x_scale": normal(m).abs() + 0.1, "weight_scale": (normal(n).abs() + 0.1) * k**-0.5}
        compare(x, w, "cuda", what=f"{m}x{n}x{k}", act="silu", gated=True, **scales)


FILL = r"""
extern "C" __global__ void fill(unsigned value, unsigned* out) {
  extern __shared__ unsigned words[];
  for (int i = threadIdx.x; i < 227 * 256; i += blockDim.x) words[i] = value;
  __syncthreads();
  if (words[threadIdx.x] != value) *out = 1;
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP8])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 40, 64), (3, 100, 1040), (7, 8200, 1056), (4, 1280, 8208), (16, 100, 1040), (11, 1300, 8208), (64, 72, 528)]
)
def test_what_shared_memory_held_before_is_not_used(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """All of it is NaN in any of these types (all ones, 0x7f7f) before the product."""
    cupy = pytest.importorskip("cupy")
    fill = cupy.RawKernel(FILL, "fill")
    fill.max_dynamic_shared_size_bytes = 227 * 1024
    x, w = normal(m, k, dtype=dtype).cuda(), normal(n, k, dtype=dtype).cuda()
    y, bound = want(x.cpu(), w.cpu())
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    for value in (0xFFFFFFFF, 0x7F7F7F7F):
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            fill((264,), (256,), (cupy.uint32(value), flag.data_ptr()), shared_mem=227 * 1024)
        got = skinny_linear(x, w)
        rounding = EPS[got.dtype] * (1 + EPS[got.dtype])
        assert_close(got, y, rtol=rounding, atol=bound * (1 + rounding) + torch.finfo(got.dtype).smallest_normal * EPS[got.dtype])
    assert flag.item() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (1280, 8192), (20000, 512), (40, 1024)])
def test_a_row_has_the_same_bits_in_every_batch_of_its_kernel_and_in_every_run(n: int, k: int, dtype: torch.dtype) -> None:
    """Up to 2 rows, up to 8, up to 16, and from 17 on."""
    x, w = normal(64, k, dtype=dtype).cuda(), normal(n, k, dtype=dtype).cuda()
    given = {} if dtype == FP8 else {"norm_weight": normal(k, dtype=dtype).cuda(), "eps": 1e-6}
    for extra in ({}, given):
        by_rows = {
            size: torch.cat([skinny_linear(x[first : first + size], w, **extra) for first in range(0, 64, size)]) for size in (2, 8, 16, 64)
        }
        for m in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64):
            expected = by_rows[next(size for size in by_rows if m <= size)]
            for first in {0, 64 - m}:
                for _ in range(3):
                    rows = slice(first, first + m)
                    assert_same(skinny_linear(x[rows], w, **extra), expected[rows], f"rows {first} to {first + m}")


@pytest.mark.gpu
def test_graph_replay() -> None:
    x, w = normal(4, 512, dtype=BF16).cuda(), normal(1024, 512, dtype=BF16).cuda()
    skinny_linear(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = skinny_linear(skinny_linear(x, w)[:, :512], w)
    for _ in range(3):
        x.copy_(normal(4, 512, dtype=BF16))
        graph.replay()
        assert_same(y, skinny_linear(skinny_linear(x, w)[:, :512].clone(), w))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 16])
def test_chained_launches_wait_for_each_other(m: int) -> None:
    """A chain in which each product reads what the one before wrote, and overwrites what the one before that read, against the same
    chain with a pause after each launch."""
    w = normal(4096, 4096, dtype=BF16, scale=1 / 64).cuda()
    start = normal(m, 4096, dtype=BF16).cuda()

    def chain(pause: bool) -> Tensor:
        x = start
        for _ in range(40):
            x = skinny_linear(x, w, residual=start)
            if pause:
                torch.cuda.synchronize()
        return x

    slow = chain(True)
    for _ in range(5):
        assert_same(chain(False), slow)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [8, 16])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (4096, 512), (40000, 256)])
def test_nothing_is_read_before_a_late_writer_has_written(n: int, k: int, m: int) -> None:
    """x, the residual and the scales."""
    w, g = normal(n, k, dtype=BF16).cuda(), normal(k, dtype=BF16).cuda()
    x, residual = normal(m, k, dtype=BF16).cuda(), normal(m, n, dtype=BF16).cuda()
    w8, x8, scale = w.to(FP8), x.to(FP8), torch.rand(m, device="cuda") + 0.5
    check_waits(lambda t: skinny_linear(t, w), x, "x")
    check_waits(lambda t: skinny_linear(t, w, norm_weight=g, eps=1e-5), x, "x, norm")
    check_waits(lambda t: skinny_linear(x, w, residual=t), residual, "residual")
    check_waits(lambda t: skinny_linear(t, w8), x8, "x of e4m3")
    check_waits(lambda t: skinny_linear(x8, w8, x_scale=t), scale, "x_scale")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 8192), (8192, 3584)])
def test_a_chain_behind_a_late_writer(n: int, k: int, m: int) -> None:
    """Products of e4m3 that let the next kernel in before they wait: it waits for them all the same."""
    w, x, scale = normal(n, k, dtype=FP8).cuda(), normal(m, k, dtype=FP8).cuda(), torch.rand(m, device="cuda") + 0.5
    then = normal(1024, n, dtype=BF16).cuda()

    def chain(t: Tensor) -> Tensor:
        return skinny_linear(skinny_linear(t, w, x_scale=scale), then)

    expected = chain(x)
    buffer = poison(torch.empty_like(x))
    poison_allocator((m, n), BF16, "cuda")
    write_late(buffer, x)
    assert_same(chain(buffer), expected)


def test_opcheck_and_compile() -> None:
    x, w = normal(3, 16, dtype=BF16), normal(16, 16, dtype=BF16)
    torch.library.opcheck(torch.ops.pyllm.skinny_linear.default, (x, w))
    torch.library.opcheck(torch.ops.pyllm.skinny_linear.default, (x, w), {"act": 0, "gated": True, "norm_weight": x[0], "eps": 1e-5})
    compiled = torch.compile(skinny_linear, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x, w, act="silu"), skinny_linear(x, w, act="silu"))


@pytest.mark.parametrize("device", ["cpu", "meta", GPU])
def test_errors(device: str) -> None:
    error = RuntimeError if device == "cuda" else ValueError
    x, w = torch.zeros(3, 32, dtype=BF16, device=device), torch.zeros(16, 32, dtype=BF16, device=device)
    q = torch.zeros(3, 32, dtype=FP8, device=device)
    call = torch.ops.pyllm.skinny_linear
    f = torch.float32
    for args, given, message in (
        ((x[0], w), {}, "x has 1 dimensions, expected 2"),
        ((x.float(), w.float()), {}, "x is float32, expected bfloat16 or float16 or float8_e4m3fn"),
        ((x, w.half()), {}, "weight is float16, expected bfloat16 like x"),
        ((x.new_zeros(65, 32), w), {}, r"x \.size\(0\) is 65, expected at most 64"),
        ((x, w[:, :16].contiguous()), {}, r"weight \.size\(1\) is 16, expected K=32 \(from x\)"),
        ((x[:, :12].contiguous(), w[:, :12].contiguous()), {}, r"x \.size\(1\) is 12, expected a multiple of 8, at least 8"),
        ((x.new_zeros(3, 36)[:, :32], w), {}, r"x \.stride\(0\) is 36 elements, expected a multiple of 8"),
        ((x, w.t().contiguous().t()), {}, r"weight \.stride\(1\) is 16, expected 1"),
        ((x, w[:8]), {"gated": True}, r"weight \.size\(0\) is 8, expected a multiple of 16 with gated"),
        ((x, w, x.new_zeros(15)), {}, r"bias \.size\(0\) is 15, expected N=16"),
        ((x, w, x.new_zeros(16, dtype=f)), {}, "bias is float32, expected bfloat16"),
        ((x, w), {"residual": x.new_zeros(3, 8)}, "residual "),
        ((x, w), {"x_scale": x.new_zeros(3, dtype=f)}, "x_scale is given, expected None unless x is float8_e4m3fn"),
        ((x, w), {"act": 4}, r"act is 4, expected -1 to 3"),
        ((x, w), {"softcap": -1.0}, "softcap is -1"),
        ((x, w), {"norm_weight": x.new_zeros(16)}, r"norm_weight \.size\(0\) is 16, expected K=32"),
        ((x.half(), w.half()), {"norm_weight": x[0], "fp16": True}, "norm_weight is given, expected None unless x is bfloat16"),
        ((q, w), {}, "weight is bfloat16, expected float8_e4m3fn like x"),
        ((x, w), {"fp16": True}, "fp16 is True, expected False because x is bfloat16"),
    ):
        with pytest.raises(error, match=f"skinny_linear: {message}"):
            call(*args, **given)
    with pytest.raises(ValueError, match="act is 'tanh', expected None or one of silu"):
        skinny_linear(x, w, act="tanh")
