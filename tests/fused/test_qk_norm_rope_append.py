"""qk_norm_rope_append: Q out, K and V in the paged caches, for every layout of heads, rotation and cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyllm.ops.rope import qk_norm_rope_append
from tests.fused.rope_cases import BF16, FP16, FP32, Shape, check, make
from tests.support.compare import assert_same
from tests.support.generate import FP8, poison, poison_allocator

SHAPES = [
    Shape(),
    Shape(T=1, H=8, K=1, D=128, R=128, norm=""),
    Shape(T=3, H=32, K=8, D=128, R=128, weight_dtype=BF16, P=64),
    Shape(T=17, H=28, K=4, D=128, R=128, norm="", dtype=FP16),
    Shape(T=4, H=6, K=6, D=80, R=80, norm="q"),
    Shape(T=4, H=6, K=3, D=96, R=96, norm="k", dtype=FP16, weight_dtype=FP16),
    Shape(T=4, H=3, K=1, D=192, R=64),
    Shape(T=4, H=16, K=8, D=256, R=256, P=3),
    Shape(T=9, H=40, K=20, D=256, R=64, fp8=True),
    Shape(T=5, H=5, K=1, D=72, R=48),
    Shape(T=5, H=2, K=1, D=40, R=16),
    Shape(T=5, H=2, K=1, D=8, R=8),
    Shape(T=5, H=32, K=32, D=80, R=32, norm="", P=1),
    Shape(T=5, R=None),
    Shape(T=5, R=None, norm="", fp8=True, scales="K"),
    Shape(T=6, D=128, R=128, interleaved=True, norm=""),
    Shape(T=6, D=128, R=64, interleaved=True),
    Shape(T=6, D=192, R=24, interleaved=True, fp8=True, scales="1"),
    Shape(T=6, D=80, R=20),
    Shape(T=6, D=256, R=20, norm="", fp8=True, scales="K"),
    Shape(T=6, D=64, R=8),
    Shape(T=6, D=64, R=2, dtype=FP16),
    Shape(T=6, D=72, R=72),
    Shape(T=6, D=80, R=20, interleaved=True),
    Shape(T=6, D=64, R=10, interleaved=True, dtype=FP32),
    Shape(T=6, H=9, K=0, D=128, R=128),
    Shape(T=6, H=9, K=0, D=64, R=32, norm="", interleaved=True),
    Shape(T=6, H=5, K=2, D=128, R=128, dtype=FP32),
    Shape(T=6, H=5, K=2, D=256, R=128, dtype=FP32, fp8=True, scales="K"),
    Shape(T=20, H=32, K=8, D=128, R=128, norm="", fp8=True, scales="1"),
    Shape(T=20, H=32, K=8, D=128, R=128, fp8=True, scales="K", dtype=FP16),
    Shape(T=7, skip=1.0),
    Shape(T=20, H=32, K=8, D=128, R=128, int8=True, scales="K"),
    Shape(T=9, H=6, K=2, D=128, R=128, norm="", int8=True, scales="1", dtype=FP16),
    Shape(T=6, H=5, K=3, D=96, R=96, int8=True, scales="K", dtype=FP32),
    Shape(T=6, D=80, R=20, norm="q", int8=True),
]
every_shape = pytest.mark.parametrize("s", SHAPES, ids=str)


@every_shape
def test_reference(s: Shape) -> None:
    inputs = make(s)
    check(inputs, inputs.run())


def test_no_tokens() -> None:
    inputs = make(Shape(T=0))
    assert inputs.run().shape == (0, 4, 64)


def fp8_saturates(device: str) -> None:
    inputs = make(Shape(T=2, H=1, K=1, D=8, R=None, norm="", fp8=True, skip=0.0), device)
    inf = float("inf")
    inputs.qkv[0, 16:] = torch.tensor([449.0, -1e4, 448.0, inf, -inf, float("nan"), 1e-4, -0.0], dtype=BF16)
    inputs.run()
    slot = int(inputs.args["slots"][0])
    stored = inputs.args["v_cache"][slot // 16, slot % 16, 0].float().cpu()
    assert stored[:5].tolist() == [448.0, -448.0, 448.0, 448.0, -448.0]
    assert stored[5].isnan() and stored[6:].tolist() == [0.0, 0.0]


def test_fp8_saturates() -> None:
    fp8_saturates("cpu")


def int8_saturates(device: str) -> None:
    inputs = make(Shape(T=2, H=1, K=1, D=8, R=None, norm="", int8=True, skip=0.0), device)
    inf = float("inf")
    inputs.qkv[0, 16:] = torch.tensor([126.5, -127.5, 200.0, inf, -inf, float("nan"), 2.5, -0.5], dtype=BF16)
    inputs.run()
    slot = int(inputs.args["slots"][0])
    assert inputs.args["v_cache"][slot // 16, slot % 16, 0].tolist() == [126, -127, 127, 127, -127, 0, 2, 0]


def test_int8_saturates() -> None:
    int8_saturates("cpu")


def call(device: str, **changes: object) -> torch.Tensor:
    """A correct call (H 4, K 2, D 64, R 32, T 3) with some arguments replaced."""
    i32 = dict(dtype=torch.int32, device=device)
    args: dict[str, object] = dict(
        qkv=torch.zeros(3, 512, dtype=BF16, device=device),
        heads=4,
        kv_heads=2,
        cos_sin=torch.zeros(9, 32, device=device),
        rows=torch.zeros(3, **i32),
        interleaved=False,
        q_weight=torch.zeros(64, device=device),
        k_weight=torch.zeros(64, device=device),
        eps=1e-6,
        k_cache=torch.zeros(2, 16, 2, 64, dtype=BF16, device=device),
        v_cache=torch.zeros(2, 16, 2, 64, dtype=BF16, device=device),
        slots=torch.arange(3, **i32),
        k_scale=None,
        v_scale=None,
    )
    args.update(changes)
    return torch.ops.pyllm.qk_norm_rope_append(*args.values())


E = torch.empty
ERRORS = [
    (lambda d: dict(qkv=E(512, device=d)), "qkv has 1 dimensions, expected 2"),
    (lambda d: dict(qkv=E(3, 520, dtype=BF16, device=d)), r"has head dimension 65, expected a multiple of 8"),
    (lambda d: dict(qkv=E(3, 8 * 264, dtype=BF16, device=d)), r"has head dimension 264"),
    (lambda d: dict(qkv=E(3, 528, dtype=BF16, device=d), heads=5), r".size\(1\) is 528, expected a multiple of heads \+ 2 \* kv_heads = 9"),
    (lambda d: dict(qkv=E(3, 513, dtype=BF16, device=d)[:, :512]), r"qkv .stride\(0\) is 513 elements, expected a multiple of 8"),
    (lambda d: dict(heads=0), "heads is 0, expected >= 1"),
    (lambda d: dict(kv_heads=-1), "kv_heads is -1, expected >= 0"),
    (lambda d: dict(rows=None), "rows is None, expected a tensor because cos_sin is given"),
    (lambda d: dict(cos_sin=None), "rows is given, expected None because cos_sin is None"),
    (lambda d: dict(cos_sin=E(9, 66, device=d)), r"cos_sin .size\(1\) is 66, expected an even number from 2 to the head dimension 64"),
    (lambda d: dict(cos_sin=E(9, 31, device=d)), r"cos_sin .size\(1\) is 31, expected an even number"),
    (lambda d: dict(cos_sin=E(9, 32, dtype=BF16, device=d)), "cos_sin is bfloat16, expected float32"),
    (lambda d: dict(rows=E(4, dtype=torch.int32, device=d)), r"rows .size\(0\) is 4, expected T=3"),
    (lambda d: dict(rows=E(3, dtype=torch.int64, device=d)), "rows is int64, expected int32"),
    (lambda d: dict(q_weight=E(32, device=d)), r"q_weight .size\(0\) is 32, expected D=64"),
    (lambda d: dict(k_weight=E(64, dtype=FP16, device=d)), "k_weight is float16, expected float32 or bfloat16"),
    (lambda d: dict(eps=-1.0), "eps is -1, expected >= 0"),
    (lambda d: dict(k_cache=None), "k_cache is None, expected a tensor because kv_heads is 2"),
    (lambda d: dict(slots=None), "slots is None, expected a tensor because kv_heads is 2"),
    (lambda d: dict(qkv=E(3, 256, dtype=BF16, device=d), kv_heads=0), "k_cache is given, expected None because kv_heads is 0"),
    (lambda d: dict(k_cache=E(2, 16, 2, 64, dtype=FP16, device=d)), r"k_cache is float16, expected bfloat16(,| or) float8_e4m3fn or int8"),
    (lambda d: dict(v_cache=E(2, 16, 2, 64, dtype=FP8, device=d)), "v_cache is float8_e4m3fn, expected bfloat16"),
    (lambda d: dict(v_cache=E(2, 8, 2, 64, dtype=BF16, device=d)), r"v_cache .size\(1\) is 8, expected"),
    (lambda d: dict(k_cache=E(2, 16, 4, 64, dtype=BF16, device=d)), r"k_cache .size\(2\) is 4, expected K=2"),
    (lambda d: dict(k_cache=E(2, 2, 16, 64, dtype=BF16, device=d).transpose(1, 2)), r"k_cache .stride\(1\) is 64, expected 128"),
    (lambda d: dict(k_cache=E(2, 2049, dtype=BF16, device=d)[:, :2048].view(2, 16, 2, 64)), r"k_cache .stride\(0\) is 2049 elements"),
    (lambda d: dict(slots=E(2, dtype=torch.int32, device=d)), r"slots .size\(0\) is 2, expected T=3"),
    (lambda d: dict(k_scale=E(1, device=d)), "k_scale is given, expected None because the cache is neither float8_e4m3fn nor int8"),
]


@pytest.mark.parametrize(("make_changes", "message"), ERRORS, ids=range(len(ERRORS)))
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_errors(device: str, make_changes, message: str) -> None:
    assert call(device).shape == (3, 4, 64)
    with pytest.raises((ValueError, RuntimeError), match=f"qk_norm_rope_append: .*{message}"):
        call(device, **make_changes(device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_scale_errors(device: str) -> None:
    caches = {name: torch.zeros(2, 16, 2, 64, device=device).to(FP8) for name in ("k_cache", "v_cache")}
    with pytest.raises((ValueError, RuntimeError), match=r"v_scale .size\(0\) is 3, expected K=2"):
        call(device, **caches, v_scale=E(3, device=device))
    assert call(device, **caches, k_scale=torch.ones(1, device=device), v_scale=torch.ones(2, device=device)).shape == (3, 4, 64)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fp8", [False, True])
def test_opcheck(device: str, fp8: bool) -> None:
    inputs = make(Shape(fp8=fp8, scales="K" if fp8 else ""), device)
    for name in ("k_cache", "v_cache"):
        inputs.args[name].view(torch.uint8).zero_()  # opcheck compares arguments, and NaN differs from itself
    names = ("cos_sin", "rows", "interleaved", "q_weight", "k_weight", "eps", "k_cache", "v_cache", "slots", "k_scale", "v_scale")
    args = (inputs.qkv, 4, 2, *(inputs.args.get(name) for name in names))
    # test_schema compares tensors by allclose, which torch does not have for e4m3.
    which = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic") + (() if fp8 else ("test_schema",))
    torch.library.opcheck(torch.ops.pyllm.qk_norm_rope_append.default, args, test_utils=which)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compile(device: str) -> None:
    inputs = make(Shape(), device)
    args = dict(inputs.args)
    compiled = torch.compile(lambda qkv: qk_norm_rope_append(qkv, 4, 2, **args), fullgraph=True, backend="aot_eager")
    check(inputs, compiled(inputs.qkv))


LARGE = [
    Shape(T=257, H=32, K=8, D=128, R=128, norm="", P=64),
    Shape(T=2000, H=32, K=8, D=128, R=128),
    Shape(T=2000, H=64, K=8, D=128, R=128, norm="", fp8=True, scales="K"),
    Shape(T=1500, H=32, K=4, D=64, R=64, dtype=FP16),
    Shape(T=1000, H=16, K=8, D=256, R=256, fp8=True),
    Shape(T=1000, H=9, K=3, D=80, R=20),
    Shape(T=700, H=9, K=3, D=128, R=128, dtype=FP32),
    # Kinds that fill no whole pass of a warp, rows of more passes than a CTA takes, Q alone, one of the norms alone.
    Shape(T=2500, H=13, K=3, D=128, R=128, norm="k", P=64),
    Shape(T=1200, H=40, K=40, D=128, R=128, norm="q", weight_dtype=BF16),
    Shape(T=1800, H=15, K=1, D=64, R=64, norm="", fp8=True, scales="1"),
    Shape(T=1500, H=10, K=0, D=256, R=256, dtype=FP16, weight_dtype=FP16),
    Shape(T=3000, H=7, K=5, D=64, R=64, fp8=True, scales="K", dtype=FP16),
    Shape(T=2000, H=32, K=8, D=128, R=128, int8=True, scales="K"),
    Shape(T=2500, H=13, K=3, D=64, R=64, norm="", int8=True, scales="1", dtype=FP16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("s", SHAPES + LARGE, ids=str)
def test_kernel(s: Shape) -> None:
    inputs = make(s, "cuda")
    poison_allocator((s.T, s.H, s.D), s.dtype, "cuda")
    q = inputs.run()
    check(inputs, q)
    assert_same(inputs.run(), q, "second run")


@pytest.mark.gpu
@pytest.mark.parametrize("s", [SHAPES[0], SHAPES[2], SHAPES[18], replace(LARGE[1], skip=0.0)], ids=str)
def test_row_alone(s: Shape) -> None:
    """Q, K and V of a token do not depend on the other tokens of the call, bit by bit."""
    inputs = make(s, "cuda")
    q = inputs.run()
    stored = {name: inputs.args[name].clone() for name in ("k_cache", "v_cache")}
    for name in stored:
        poison(inputs.args[name])
    for t in (0, s.T // 2, s.T - 1):
        args = dict(inputs.args)
        args.update({name: args[name][t : t + 1] for name in ("rows", "slots")})
        assert_same(qk_norm_rope_append(inputs.qkv[t : t + 1], s.H, s.K, **args), q[t : t + 1], f"q of token {t}")
        slot = int(args["slots"][0])
        for name, all_of_it in stored.items():
            if slot >= 0:
                at = slot // s.P, slot % s.P
                assert_same(inputs.args[name][at], all_of_it[at], f"{name} of token {t}")


@pytest.mark.gpu
@pytest.mark.parametrize("s", [SHAPES[2], LARGE[1]], ids=str)
def test_weights_at_any_element(s: Shape) -> None:
    """Weights that start between multiples of 16 bytes give the values of aligned ones."""
    inputs = make(s, "cuda")
    for name in ("q_weight", "k_weight"):
        weight = inputs.args[name]
        inputs.args[name] = torch.cat((weight[:1], weight))[1:]
    check(inputs, inputs.run())


@pytest.mark.gpu
def test_kernel_special() -> None:
    fp8_saturates("cuda")
    int8_saturates("cuda")
    assert make(Shape(T=0), "cuda").run().shape == (0, 4, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("s", [replace(SHAPES[2], skip=0.0), replace(LARGE[1], skip=0.0)], ids=str)
def test_graph(s: Shape) -> None:
    """A graph follows changed inputs, lines and slots; chained twice, the second reads what the first wrote."""
    inputs, other = make(s, "cuda"), make(s, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = inputs.qkv.clone()
        first = qk_norm_rope_append(rows, s.H, s.K, **inputs.args)
        again = qk_norm_rope_append(first.view(s.T, -1), s.H, 0, inputs.args["cos_sin"], inputs.args["rows"])
    for name in ("k_cache", "v_cache"):
        poison(inputs.args[name])
    inputs.qkv.copy_(other.qkv)
    for name in ("cos_sin", "rows", "slots", "q_weight", "k_weight"):
        inputs.args[name].copy_(other.args[name])
    first.fill_(float("nan"))
    again.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    check(inputs, first)
    assert_same(again, qk_norm_rope_append(first.view(s.T, -1), s.H, 0, inputs.args["cos_sin"], inputs.args["rows"]))


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_31_bits() -> None:
    s = Shape(T=4, H=4, K=2, D=64, fp8=True, skip=0.0)
    inputs = make(s, "cuda")
    stride = 2**31 + 16
    far = {}
    for name in ("k_cache", "v_cache"):
        size = s.P * s.K * s.D
        buffer = torch.empty(stride + size, dtype=FP8, device="cuda")
        far[name] = buffer.as_strided((2, s.P, s.K, s.D), (stride, s.K * s.D, s.D, 1))
        poison(far[name][0]), poison(far[name][1])
    inputs.args.update(far, slots=torch.tensor([0, 17, 31, 5], dtype=torch.int32, device="cuda"))
    check(inputs, inputs.run())
