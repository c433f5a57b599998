"""fused_experts (sort, grouped GEMMs, weighted sum) against fp64 formulas; bounds follow each rounding through the two products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pyllm import ops
from pyllm.ops.moe import _experts_composition
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, padded_rows, poison, poison_allocator

BF16, FP16, E4M3, U32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, 2.0**-24
gpu = pytest.mark.gpu


@dataclass
class Case:
    """T tokens of width N, E experts of F, top_k choices."""

    T: int = 9
    N: int = 64
    F: int = 48
    E: int = 5
    top_k: int = 2
    dtype: torch.dtype = BF16
    weights: torch.dtype | None = None  # E4M3, or as dtype
    bias: bool = False
    clamp: tuple[float, float] | None = None
    act: str = "silu"
    routing: str = "random"  # "one": all choose expert 1; "half": experts of the upper half are empty

    def make(self, device: str = "cpu") -> tuple[tuple[Tensor, ...], dict]:
        x = normal(self.T, self.N, dtype=self.dtype)
        w13, w2 = normal(self.E, 2 * self.F, self.N, scale=self.N**-0.5), normal(self.E, self.N, self.F, scale=self.F**-0.5)
        options: dict = {"act": self.act, "clamp": self.clamp}
        if self.weights == E4M3:
            (w13, s13), (w2, s2) = (ops.quantize_fp8(w.flatten(0, 1), "token") for w in (w13, w2))
            w13, w2 = w13.view(self.E, -1, self.N), w2.view(self.E, -1, self.F)
            options |= {"w13_scale": s13.view(self.E, -1).to(device), "w2_scale": s2.view(self.E, -1).to(device)}
        else:
            w13, w2 = w13.to(self.dtype), w2.to(self.dtype)
        if self.bias:
            options |= {"w13_bias": normal(self.E, 2 * self.F, dtype=self.dtype).to(device)}
            options |= {"w2_bias": normal(self.E, self.N, dtype=self.dtype).to(device)}
        args = (x, w13, w2, self.ids(), torch.rand(self.T, self.top_k) + 0.1)
        return tuple(t.to(device) for t in args), options

    def ids(self) -> Tensor:
        if self.routing == "one":
            return torch.ones(self.T, self.top_k, dtype=torch.int32)
        experts = max(self.top_k, self.E // 2) if self.routing == "half" else self.E
        return torch.rand(self.T, experts).argsort(1)[:, : self.top_k].int().contiguous()


def act_of(case: Case, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """f(gate, up) in fp64, and a bound of its derivatives: |f'| <= slope * (|up side| for the gate's error, |gate side| for up's)."""
    if case.clamp:
        alpha, limit = case.clamp
        g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
        return g * torch.sigmoid(alpha * g), u + 1
    kinds = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "relu2": lambda t: t.relu().square()}
    return kinds[case.act](gate), up


def one_product(case: Case, x: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None, x_error: Tensor) -> tuple[Tensor, Tensor]:
    """w x + bias of fp64 tensors, and a bound of its error: K + 4 roundings of fp32, and the error of x.

    e4m3: the rows of x are rounded to 4 significant bits (2^-4 of the value, or half of a smallest step, 2^-10 / 448 of the largest), and
    the tensor core keeps 2^-13 of the largest term in each of its K / 32 steps (as in the tests of linear_fp8).
    """
    k = x.shape[1]
    coarse = 0.0
    if scale is not None:
        w = w * scale.double()[:, None]
        largest = (x.abs() + x_error).amax(1, keepdim=True)
        x_error = x_error * (1 + EPS[E4M3]) + (x.abs() * EPS[E4M3] + largest * 2.0**-10 / 448) * (1 + 2.0**-20)
        coarse = 2.0**-13 * min(-(-k // 32), 8)
    y, size = x @ w.T, (x.abs() + x_error) @ w.abs().T
    if bias is not None:
        y = y + bias.double()
    return y, size * ((k + 4) * U32 + coarse) + x_error @ w.abs().T + y.abs() * U32


def formula(case: Case, args: tuple[Tensor, ...], options: dict) -> tuple[Tensor, Tensor]:
    x, w13, w2, ids, weights = (t.cpu().double() if t.dtype != torch.int32 else t.cpu() for t in args)
    u, options = EPS[case.dtype], {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    y, bound, total = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for e in ids.unique().tolist():
        extra = {n: t[e] for n, t in options.items() if n.endswith(("scale", "bias"))}
        t, j = (ids == e).nonzero(as_tuple=True)
        gate_up, error = one_product(case, x[t], w13[e], extra.get("w13_scale"), extra.get("w13_bias"), torch.zeros_like(x[t]))
        (gate, up), (eg, eu) = gate_up.chunk(2, 1), error.chunk(2, 1)
        a, b = act_of(case, gate, up)
        # |silu'|, |gelu'| and the clamped one's are below 1.2; relu2' = 2 max(g, 0). Fast exp2 and reciprocal: below 2^-14 of the result.
        slope = 2 * (gate.abs() + eg) if case.act == "relu2" and not case.clamp else 1.2
        h_error = slope * eg * (b.abs() + eu) + a.abs() * eu + (a * b).abs() * 2.0**-14
        h_error = h_error + u * ((a * b).abs() + h_error) + (2.0**-25 if case.dtype == FP16 else 0.0)
        o, o_error = one_product(case, a * b, w2[e], extra.get("w2_scale"), extra.get("w2_bias"), h_error)
        o_error = o_error + u * (o.abs() + o_error) + (2.0**-25 if case.dtype == FP16 else 0.0)
        w = weights[t, j, None]
        y.index_add_(0, t, w * o)
        bound.index_add_(0, t, w * o_error)
        total.index_add_(0, t, w * o.abs())
    bound = bound + (case.top_k + 2) * U32 * total
    return y, bound + u * (y.abs() + bound) + (2.0**-25 if case.dtype == FP16 else 0.0)


def poison_workspaces(case: Case) -> None:
    rows = 64 + case.T * case.top_k
    for shape in ((rows, case.F), (rows, case.N), (case.T, case.N)):
        poison_allocator(shape, case.dtype, "cuda")
    poison_allocator((case.T * case.top_k,), torch.int32, "cuda")


def near_reference(got: Tensor, args: tuple[Tensor, ...], options: dict) -> None:
    """e4m3: the bound above lets every inner value round the other way at once, with one sign. The reference quantizes as the kernels do,
    so an inner value is the same or a whole step away, 2 roundoffs of itself at most, and the errors of a row add in quadrature: 2
    roundoffs of its norm. One roundoff is too little: a step of a row's largest inner value alone moves it by up to 0.076 of its norm
    (six draws of 1025 rows), and 0.067 was seen."""
    want = ops.fused_experts(*(t.cpu() for t in args), **{k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}).double()
    off = (got.cpu().double() - want).norm(dim=1) / want.norm(dim=1).clamp_min(2.0**-20)
    assert off.max() <= 2 * EPS[E4M3], f"rows are off by {off.max():.3g} of their norm, expected at most {2 * EPS[E4M3]}"


def check_case(case: Case, device: str = "cuda") -> Tensor:
    args, options = case.make(device)
    want, bound = formula(case, args, options)
    if device == "cuda":
        poison_workspaces(case)
    got = ops.fused_experts(*args, **options)
    assert got.dtype == case.dtype and got.is_contiguous()
    assert_close(got, want, atol=bound, what=str(case))
    if case.weights == E4M3 and device == "cuda":
        near_reference(got, args, options)
    if device == "cuda":
        poison_workspaces(case)
        assert_same(ops.fused_experts(*args, **options), got, "second run")
    return got


KINDS = {
    "bf16": Case(),
    "fp16": Case(dtype=FP16),
    "bias": Case(bias=True),
    "clamp": Case(bias=True, clamp=(1.7, 0.8)),
    "gelu": Case(act="gelu"),
    "relu2": Case(act="relu2", bias=True),
    "fp8": Case(weights=E4M3),
    "fp8-fp16-bias-clamp": Case(weights=E4M3, dtype=FP16, bias=True, clamp=(1.7, 0.8)),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T", [1, 9])
def test_against_fp64(T: int, kind: str, device: str) -> None:
    check_case(replace(KINDS[kind], T=T), device)


@gpu
@pytest.mark.parametrize("weights", [None, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize("T", [7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 128, 129, 130, 257, 1025])
def test_all_tokens_to_one_expert(T: int, weights: torch.dtype | None) -> None:
    """Rows around the edges of every tile (8 to 128), the other experts empty; E chooses the tile: T / E rows on average."""
    for E in (2, 16, 64):
        check_case(Case(T=T, E=E, top_k=1, routing="one", weights=weights))


@gpu
@pytest.mark.parametrize("weights", [None, E4M3], ids=["bf16", "fp8"])
@pytest.mark.parametrize("T", [3, 40, 300, 1500])
def test_random_routing_with_empty_experts(T: int, weights: torch.dtype | None) -> None:
    for E, top_k in ((8, 2), (60, 4), (128, 8)):
        check_case(Case(T=T, E=E, top_k=top_k, routing="half", weights=weights, bias=True))


@gpu
@pytest.mark.parametrize(("N", "F"), [(8, 8), (16, 16), (72, 40), (264, 136), (1000, 264), (2048, 768)])
def test_widths_around_the_tiles(N: int, F: int) -> None:
    for T in (2, 50, 400):
        check_case(Case(T=T, N=N, F=F, E=4))
        if N % 16 == F % 16 == 0:
            check_case(Case(T=T, N=N, F=F, E=4, weights=E4M3))


@gpu
def test_one_and_many_experts() -> None:
    check_case(Case(T=20, E=1, top_k=1))
    check_case(Case(T=20, E=1024, top_k=8, N=32, F=16))
    check_case(Case(T=6, E=40, top_k=40))
    check_case(Case(T=9000, E=300, top_k=3, N=32, F=16))  # the sort spreads over a cluster


@gpu
@pytest.mark.parametrize("weights", [None, E4M3], ids=["bf16", "fp8"])
def test_a_token_has_the_same_bits_in_any_batch(weights: torch.dtype | None) -> None:
    """Tiles of 8 to 128 rows sum in one order."""
    case = Case(T=600, N=256, F=192, E=4, weights=weights)
    (x, w13, w2, ids, share), options = case.make("cuda")
    whole = ops.fused_experts(x, w13, w2, ids, share, **options)
    for n in (1, 5, 20, 70, 300):
        assert_same(ops.fused_experts(x[:n], w13, w2, ids[:n], share[:n], **options), whole[:n], f"{n} tokens")


@gpu
def test_graph_replay_with_other_routing() -> None:
    case = Case(T=70, E=16, top_k=4, weights=E4M3)
    args, options = case.make("cuda")
    ops.fused_experts(*args, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fused_experts(*args, **options)
    for routing in ("one", "half", "random"):
        args[3].copy_(replace(case, routing=routing).ids())
        args[0].copy_(normal(70, case.N, dtype=BF16))
        graph.replay()
        assert_same(y, ops.fused_experts(*args, **options), routing)


LATE = r"""
extern "C" __global__ void late(const uint4* from, uint4* to, int n) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (long long start = clock64(); clock64() - start < 300000;) {}
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}
"""


@gpu
@pytest.mark.parametrize("T", [8, 600])
@pytest.mark.parametrize("weights", [None, E4M3], ids=["bf16", "fp8"])
def test_nothing_is_read_before_a_late_writer_has_written(weights: torch.dtype | None, T: int) -> None:
    """The kernel ahead lets its dependents start at once and writes x, the ids or the weights 0.15 ms later."""
    cupy = pytest.importorskip("cupy")
    late = cupy.RawKernel(LATE, "late")
    args, options = Case(T=T, weights=weights).make("cuda")
    want = ops.fused_experts(*args, **options)
    for index in (0, 3, 4):
        buffer = poison(torch.empty_like(args[index]))
        torch.cuda.synchronize()
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            size = buffer.numel() * buffer.element_size() // 16
            late((1,), (1024,), (args[index].data_ptr(), buffer.data_ptr(), size))
        assert_same(ops.fused_experts(*args[:index], buffer, *args[index + 1 :], **options), want, f"argument {index}")


@gpu
@pytest.mark.parametrize("T", [1, 8, 300])
def test_a_chain_without_pauses(T: int) -> None:
    """Kernels of one call may start beside those of the call before it."""
    (x, *rest), options = Case(T=T, N=256, F=512, E=8).make("cuda")

    def chain(pause: bool) -> Tensor:
        y = x
        for _ in range(3):  # the gate is quadratic: values shrink fast
            y = ops.fused_experts(y, *rest, **options)
            if pause:
                torch.cuda.synchronize()
        return y

    slow = chain(True)
    assert slow.abs().amax() > 0
    for _ in range(20):
        assert_same(chain(False), slow)


@gpu
def test_strided_rows_and_no_tokens() -> None:
    case = Case(T=21)
    (x, *rest), options = case.make("cuda")
    strided, intact = padded_rows(x, gap=8, offset=8)
    assert_same(ops.fused_experts(strided, *rest, **options), ops.fused_experts(x, *rest, **options))
    intact()
    (x, w13, w2, ids, share), options = replace(case, T=0).make("cuda")
    assert ops.fused_experts(x, w13, w2, ids, share, **options).shape == (0, case.N)


@gpu
def test_an_expert_that_is_not_there_or_not_finite() -> None:
    """An id outside makes its token NaN and no other; an expert of NaN reaches only tokens that chose it."""
    (x, w13, w2, ids, share), options = Case(T=30, E=6).make("cuda")
    want = ops.fused_experts(x, w13, w2, ids, share, **options)
    for bad in (-1, 6, 2**31 - 1, -(2**31)):
        wrong = ids.clone()
        wrong[7, 1] = bad
        got = ops.fused_experts(x, w13, w2, wrong, share, **options)
        assert got[7].isnan().all()
        keep = torch.arange(30, device="cuda") != 7
        assert_same(got[keep], want[keep])
    w13[2] = float("nan")
    got, chose = ops.fused_experts(x, w13, w2, ids, share, **options), (ids == 2).any(1)
    assert got[chose].isnan().all() and chose.any()
    assert_same(got[~chose], want[~chose])


@gpu
def test_moe_experts_runs_on_it() -> None:
    (x, w13, w2, ids, share), options = Case(T=30, E=6, bias=True, clamp=(1.7, 0.8)).make("cuda")
    assert_same(ops.moe_experts(x, w13, w2, ids, share, **options), ops.fused_experts(x, w13, w2, ids, share, **options))
    wide = [t.float() for t in (x, w13, w2)]
    biases = [options[n].float() for n in ("w13_bias", "w2_bias")]
    got = ops.moe_experts(*wide, ids, share, w13_bias=biases[0], w2_bias=biases[1], clamp=(1.7, 0.8))
    assert_same(got, _experts_composition(*wide, ids, share, 0, *biases, 1.7, 0.8), "fp32")


@pytest.mark.parametrize("kind", ["clamp", "fp8"])
def test_opcheck_and_compile(kind: str) -> None:
    args, options = replace(KINDS[kind], T=3).make()
    names = ("w13_scale", "w2_scale", "w13_bias", "w2_bias")
    alpha, limit = options["clamp"] or (0.0, 0.0)
    if kind != "fp8":  # opcheck itself cannot compare e4m3
        torch.library.opcheck(torch.ops.pyllm.fused_experts.default, (*args, 0, *(options.get(n) for n in names), alpha, limit))
    compiled = torch.compile(ops.fused_experts, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*args, **options), ops.fused_experts(*args, **options))


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=gpu)])
def test_errors(device: str) -> None:
    (x, w13, w2, ids, share), _ = Case(T=3).make(device)
    scale13, scale2 = torch.ones(5, 96, device=device), torch.ones(5, 64, device=device)
    bad: list[tuple[tuple, dict, str]] = [
        ((x[0], w13, w2, ids, share), {}, "x has 1 dimensions, expected 2"),
        ((x.float(), w13, w2, ids, share), {}, "x is float32, expected bfloat16 or float16"),
        ((x, w13, w2.half(), ids, share), {}, "w2 is float16, expected bfloat16 like w13"),
        ((x, w13, w2, ids.long(), share), {}, "ids is .*int64, expected int32"),
        ((x, w13, w2, ids, share.half()), {}, "weights is .*float16, expected float32"),
        ((x, w13, w2, ids, share), {"w13_scale": scale13, "w2_scale": scale2}, "w13_scale"),
        ((x, w13.to(E4M3), w2.to(E4M3), ids, share), {"w13_scale": scale13}, "w13_scale .*both"),
        ((x, w13, w2, ids, share), {"w13_bias": scale13}, "w13_bias is float32, expected bfloat16"),
        ((x, w13[..., :60], w2[:, :60], ids, share), {}, "w13"),
    ]
    for args, options, message in bad:
        with pytest.raises((ValueError, RuntimeError), match=f"fused_experts: {message}"):
            ops.fused_experts(*args, **options)
    with pytest.raises(ValueError, match="act is 'tanh', expected one of silu"):
        ops.fused_experts(x, w13, w2, ids, share, "tanh")
    with pytest.raises(ValueError, match=r"clamp is \(1.0, 0.0\), expected None or"):
        ops.fused_experts(x, w13, w2, ids, share, clamp=(1.0, 0.0))


def test_an_expert_that_is_not_there_on_a_cpu() -> None:
    (x, w13, w2, ids, share), options = Case(T=3).make()
    with pytest.raises(ValueError, match=r"fused_experts: ids holds 5, expected 0\.\.E-1=4"):
        ops.fused_experts(x, w13, w2, torch.where(ids == ids[0, 0], 5, ids), share, **options)
