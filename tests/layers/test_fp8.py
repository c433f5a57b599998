"""The format Fp8: quantized at bind time, per output channel and per token, on any declaration."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyllm import ops
from pyllm.layers import MLP, Attn, Decoder, Embedding, Fp8, LayerNorm, Linear, Normed, Part, RMSNorm, Rope, Split, Sub, bind, fp8
from pyllm.plan.explain import explain
from tests.layers.custom import DIM, FF, HEADS, KV, VOCAB, D, mine, random_state
from tests.layers.test_custom import IDS
from tests.models.paged import Paged
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal

PLAN = (("lm_head", None), ("*.experts.*", None), ("*.gate", None), ("*", Fp8()))


def one(n: int = 48, k: int = 64, bias: bool = False, **kwargs):
    return Linear(k, (Part("a", n),), bias=bias, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_linear_is_the_two_ops(dtype):
    state = {"a.weight": normal(48, 64), "a.bias": normal(48)}
    m, x = bind(one(bias=True), state, quant=[("*", Fp8())], dtype=dtype), normal(5, 64).to(dtype)
    (q, s), (w, ws) = ops.quantize_fp8(x, "token"), ops.quantize_fp8(state["a.weight"], "token")
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    want = ops.linear_fp8(q, w, s, ws, state["a.bias"].to(dtype).to(half), half).to(dtype)
    assert_same(m.weight, w)
    assert_same(m.weight_scale, ws)
    assert_same(m(x), want)


def test_error_of_a_product():
    """Each operand is rounded once to e4m3 (u = 2^-4, or half a smallest step 2^-10 of the row's scale), the result to bf16."""
    w, x = normal(64, 256), normal(7, 256)
    got = bind(one(64, 256), {"a.weight": w}, quant=[("*", Fp8())])(x)
    u, step = EPS[torch.float8_e4m3fn], 2.0**-10 / 448
    xe, we = (t.abs() * u + t.abs().amax(1, keepdim=True) * step for t in (x.double(), w.double()))
    bound = xe @ w.double().abs().T + x.double().abs() @ we.T + xe @ we.T
    want = x.double() @ w.double().T
    assert_close(got, want, atol=bound + EPS[torch.bfloat16] * (want.abs() + bound) + 1e-6)


def test_a_whole_model():
    """Logits move by what two e4m3 roundings per product explain, and not more: the plan leaves router, experts and head alone."""
    spec = mine()
    state = random_state(spec)
    plain, quantized = (bind(spec, state, quant=q)(Paged(spec, 1, len(IDS)).step([IDS])) for q in ((), PLAN))
    moved = (plain - quantized).norm() / plain.norm()
    assert 1e-4 < moved < 0.2


def test_ranks_share_the_plan():
    """Column-parallel: the rows of one rank have the scales they have alone."""
    state, x = {"a.weight": normal(64, 32)}, normal(4, 32)
    spec = one(64, 32, tp="col")
    whole = bind(spec, state, quant=[("*", Fp8())])(x)
    parts = [bind(spec, state, quant=[("*", Fp8())], rank=r, tp=2)(x) for r in range(2)]
    assert_same(torch.cat(parts, 1), whole)


def test_explain_shows_both_ops_and_the_bytes():
    plain, quantized = (explain(mine(), quant=q) for q in ((), PLAN))
    assert quantized.weight_bytes < plain.weight_bytes
    separate = [r.op for r in explain(mine(), quant=PLAN, fuse=False).rows if r.format == "fp8"]
    assert separate and separate[::2] == ["quantize_fp8"] * (len(separate) // 2)
    assert separate[1::2] == ["linear_fp8"] * (len(separate) // 2)
    assert all(r.kernel == "csrc/gemm/dense_fp8" for r in quantized.rows if r.op == "linear_fp8")


def llama(layers: int = 2, gated: bool = True) -> Decoder:
    def layer(i: int) -> tuple[Sub, Sub]:
        at = f"model.layers.{i}"
        attn = Attn("attn", D, HEADS, KV, DIM, kv=i, rope=Rope(DIM), qkv_bias=True)
        mlp = MLP("mlp", D, FF, act="gelu_tanh", gated=gated)
        return (Sub(at, RMSNorm("norm1", D, 1e-6), attn), Sub(at, LayerNorm("norm2", D, 1e-6), mlp))

    head = Linear(D, (Part("lm_head", VOCAB, split=Split.PAD),), "col")
    subs = tuple(sub for i in range(layers) for sub in layer(i))
    return Decoder(Embedding("model.embed_tokens", VOCAB, D), subs, RMSNorm("model.norm", D, 1e-6), head)


def run(spec: Decoder, fuse: bool, dtype: torch.dtype = torch.float32, quant=PLAN, state=None) -> tuple[torch.Tensor, list[str]]:
    """Logits of one step, and the ops that ran."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "pyllm":
                seen.append(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    bound = bind(spec, state or random_state(spec), quant=quant, fuse=fuse, dtype=dtype, strict=state is None)
    batch = Paged(spec, 1, len(IDS), dtype=dtype).step([IDS])
    with Watch():
        return bound(batch), seen


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("spec", [llama(), mine()], ids=["llama", "mine"])
def test_explain_lists_the_ops_that_run(spec: Decoder, fuse: bool):
    rows = explain(spec, context=len(IDS), new=len(IDS), dtype=torch.float32, fuse=fuse, quant=PLAN).rows
    assert run(spec, fuse)[1] == [r.op for r in rows if r.op not in ("add", "sample_tokens")]


def test_a_fused_layer_has_one_quantize_op():
    """Of the attention's output alone: norms and the gated activation give e4m3 rows themselves."""
    spec = llama()
    ops_of = {fuse: run(spec, fuse)[1] for fuse in (True, False)}
    assert ops_of[True].count("quantize_fp8") == 2 and ops_of[False].count("quantize_fp8") == 8
    assert ops_of[True].count("act_mul_fp8") == 2 and "act_mul" not in ops_of[True]
    names = [r.what for r in explain(spec, quant=PLAN).rows]
    assert "norm to fp8" in names and names.count("add+norm to fp8") == 3


def test_fused_is_unfused_in_fp32():
    """Without a rounding to the model's dtype in between, the fused ops have the bits of the separate ones."""
    fused, separate = (run(llama(), fuse)[0] for fuse in (True, False))
    assert_same(fused, separate)


def test_the_gate_in_the_epilogue(monkeypatch: pytest.MonkeyPatch):
    """From so many rows on: the product's fp32 sums go through the activation unrounded, and the down projection's input is quantized."""
    monkeypatch.setattr(fp8, "GATE_ROWS", len(IDS))
    spec = llama()
    rows = explain(spec, context=len(IDS), new=len(IDS), dtype=torch.float32, quant=PLAN).rows
    got, seen = run(spec, True)
    assert seen == [r.op for r in rows if r.op not in ("add", "sample_tokens")] and seen.count("linear_fp8_gated") == 2
    want = run(spec, False)[0]
    assert 0 < (got - want).norm() < 0.05 * want.norm()


def test_the_gate_behind_a_plain_tensor(monkeypatch: pytest.MonkeyPatch):
    """As a shared expert gets it: no norm to take the rounding over."""
    monkeypatch.setattr(fp8, "GATE_ROWS", 4)
    state = {f"mlp.{n}_proj.weight": normal(*s) * 0.1 for n, s in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96)))}
    x = normal(5, 64)
    fused, separate = (bind(MLP("mlp", 64, 96), state, quant=(("*", Fp8()),), fuse=fuse)(x, None) for fuse in (True, False))
    assert 0 < (fused - separate).norm() < 0.05 * separate.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("quant", [(), (("*", Fp8()),)])
def test_an_mlp_of_many_rows_on_the_gpu(quant, monkeypatch: pytest.MonkeyPatch):
    """The gate in the epilogue against the separate ops. bf16 (u = 2^-8 for a step of fused and unfused each): gate and up are rounded
    before the activation in one, not in the other, so the down projection's inputs differ by a few u (4 to be safe, times 448 values
    whose signs are random); in FP8 also by one e4m3 step (2^-3) each, at random."""
    monkeypatch.setattr(fp8, "GATE_ROWS", 1024)
    spec, state = MLP("mlp", 256, 448), {f"mlp.{n}_proj.weight": normal(*s) * 0.06 for n, s in
                                         (("gate", (448, 256)), ("up", (448, 256)), ("down", (256, 448)))}  # fmt: skip
    x = normal(1100, 256, dtype=torch.bfloat16, device="cuda")
    fused, separate = (
        bind(spec, state, quant=quant, device="cuda", dtype=torch.bfloat16, fuse=fuse)(x, None).double() for fuse in (True, False)
    )
    moved = (fused - separate).norm() / separate.norm()
    assert 0 < moved < (2.0**-4 if quant else 2.0**-6)


@pytest.mark.parametrize("outlier", [1.0, 1e4])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_fused_rows_in_bf16(kind, outlier: float):
    """The norm's e4m3 rows are its exact values rounded once (2^-4, or half the smallest step 2^-10 of the scale; 2^-18 for fp32), those of
    the separate ops were rounded to bf16 before. A mean 30 times the spread and one huge value in a row."""
    spec, x = kind("n", 256, 1e-6), normal(9, 256) + 30
    x[3, 7] = outlier
    residual, delta = x.bfloat16(), normal(9, 256).bfloat16()
    norm = bind(spec, {name: normal(256) + 1 for w in spec.weights().values() for name in w.sources("")}, dtype=torch.bfloat16)
    h = (residual.float() + delta.float()).bfloat16().double()
    mean = h.mean(1, keepdim=True) if kind is LayerNorm else 0.0
    want = (h - mean) / ((h - mean).square().mean(1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    want = want + norm.bias.double() if kind is LayerNorm else want
    for bits, (q, scale) in (
        (0.0, Normed(residual.clone(), norm, delta).e4m3()),
        (EPS[torch.bfloat16], ops.quantize_fp8(Normed(residual.clone(), norm, delta).tensor(), "token")),
    ):
        step = scale.double()[:, None]
        bound = want.abs() * (EPS[torch.float8_e4m3fn] + bits + 2.0**-18) + 2.0**-10 * step + 2.0**-18 * want.abs().amax(1, keepdim=True)
        assert_close(q.double() * step, want, atol=bound * 1.01)


def test_fused_and_unfused_in_bf16_are_as_close_to_fp32():
    """A rounding to bf16 (2^-9) ahead of one to e4m3 (2^-4) moves a value across a tie now and then, in either direction."""
    exact = run(llama(), False)[0]
    fused, separate = ((run(llama(), fuse, torch.bfloat16)[0].float() - exact).norm() / exact.norm() for fuse in (True, False))
    assert 0 < fused < 1.25 * separate < 0.15


def test_experts():
    """Logits move by what two e4m3 roundings of each product of an expert explain; explain names the op and half the bytes."""
    spec, plan = mine(), [("*.experts.*", Fp8())]
    state = random_state(spec)
    plain, quantized = (bind(spec, state, quant=q)(Paged(spec, 1, len(IDS)).step([IDS])) for q in ((), plan))
    assert 1e-5 < (plain - quantized).norm() / plain.norm() < 0.2
    (whole,), (half,) = ({r.bytes for r in explain(spec, quant=q).rows if r.what == "experts"} for q in ((), plan))
    assert 0.5 < half / whole < 0.65
    assert {r.op for r in explain(spec, quant=plan).rows if r.what == "experts"} == {"fused_experts"}


def test_odd_sizes_are_refused():
    with pytest.raises(ValueError, match=r"quant plan: a is \[40, 64\], which fp8 does not multiply; expected multiples of 16"):
        bind(one(40, 64), {"a.weight": normal(40, 64)}, quant=[("*", Fp8())])
