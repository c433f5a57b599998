"""The format Fp8: quantized at bind time, per output channel and per token, on any declaration."""

from __future__ import annotations

import pytest
import torch

from pyllm import ops
from pyllm.layers import Fp8, Linear, Part, bind
from pyllm.runtime.explain import explain
from tests.layers.custom import mine, random_state
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
    found = [r.op for r in quantized.rows if r.format == "fp8"]
    assert found and found[::2] == ["quantize_fp8"] * (len(found) // 2) and found[1::2] == ["linear_fp8"] * (len(found) // 2)
    assert all(r.kernel == "csrc/gemm/dense_fp8" for r in quantized.rows if r.op == "linear_fp8")


def test_experts_are_refused():
    with pytest.raises(TypeError, match="format fp8 has no MoE path; leave the experts out of the quant plan"):
        bind(mine(), random_state(mine()), quant=[("*.experts.*", Fp8())])


def test_odd_sizes_are_refused():
    m = bind(one(40, 64), {"a.weight": normal(40, 64)}, quant=[("*", Fp8())])
    with pytest.raises(ValueError, match=r"linear_fp8: weight \.size\(0\) is 40, expected a multiple of 16"):
        m(normal(2, 64))
