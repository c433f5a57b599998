"""Experts with biases, with the clamped activation, and stored as one tensor: against a formula in fp64, expert by expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyllm.layers import Format, Linear, MoE, Part, Transform, bind, plan
from pyllm.layers.linear import StackedWeight
from pyllm.layers.spec import Weight
from pyllm.plan.explain import explain
from tests.layers.custom import random_state
from tests.layers.test_variants import FF, State, check, decoder
from tests.layers.test_variants import D as WIDTH

E, TOP, ALPHA, LIMIT = 6, 2, 1.3, 0.2
ONE = ("experts.gate_up", "experts.gate_up", "experts.down")
THREE = ("experts.gate", "experts.up", "experts.down")
EACH = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")
LAYOUTS: dict[str, dict[str, Any]] = {
    "each": dict(names=EACH),
    "three": dict(names=THREE, stacked=True),
    "one": dict(names=ONE, stacked=True),
    "interleaved": dict(names=ONE, stacked=True, interleaved=True),
}


def moe(layout: str, **changes: Any) -> MoE:
    return MoE("moe", WIDTH, FF, E, TOP, scoring="topk_softmax", **(LAYOUTS[layout] | changes))


def expert(st: State, x: torch.Tensor, e: int, layout: str, clamp: bool) -> torch.Tensor:
    """Expert e of one token x `[d]`."""
    at = "layer.moe.experts"

    def product(name: str, t: torch.Tensor) -> torch.Tensor:
        if layout == "each":
            return t @ st[f"{at}.{e}.{name}_proj.weight"].T + st.get(f"{at}.{e}.{name}_proj.bias", torch.tensor(0.0))
        bias = st.get(f"{at}.{name}_bias")
        return t @ st[f"{at}.{name}"][e] + (0 if bias is None else bias[e])

    if layout in ("one", "interleaved"):
        both = product("gate_up", x)
        gate, up = (both[0::2], both[1::2]) if layout == "interleaved" else both.chunk(2)
    else:
        gate, up = product("gate", x), product("up", x)
    if not clamp:
        return product("down", gate * gate.sigmoid() * up)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return product("down", gate * (ALPHA * gate).sigmoid() * (up + 1))


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts(layout: str, bias: bool, clamp: bool) -> None:
    spec = moe(layout, bias=bias, clamp=(ALPHA, LIMIT) if clamp else None)

    def formula(st: State, x: torch.Tensor) -> torch.Tensor:
        logits = x @ st["layer.moe.gate.weight"].T + st.get("layer.moe.gate.bias", torch.tensor(0.0))
        rows = []
        for h, row in zip(x, logits, strict=True):
            w, ids = row.topk(TOP)
            rows.append(sum(p * expert(st, h, e, layout, clamp) for p, e in zip(w.softmax(-1), ids.tolist(), strict=True)))
        return torch.stack(rows)

    check(decoder(spec), formula)


def test_one_tensor_is_read_once() -> None:
    sources = {item.tensor: item.sources for item in plan(moe("interleaved", bias=True))}
    assert sources["w13.weight"] == ("moe.experts.gate_up",) and sources["w13.bias"] == ("moe.experts.gate_up_bias",)
    state = {"x": torch.arange(24.0).view(2, 3, 4)}
    read: list[str] = []
    bound = bind(Linear(3, (Part("x", 4),), experts=2, stacked=True), state, progress=read.append)
    assert torch.equal(bound.weight, state["x"].mT) and read == ["x"]


def test_a_stacked_tensor_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"checkpoint tensor 'x' has shape \(2, 4, 3\), the declaration expects \(2, 3, 4\)"):
        bind(Linear(3, (Part("x", 4),), experts=2, stacked=True), {"x": torch.zeros(2, 4, 3)})
    assert StackedWeight((Part("x", 4),), 3, experts=2).local_shape(1) == (2, 4, 3)


def test_explain_says_that_the_grouped_kernel_runs_them() -> None:
    for bias in (False, True):
        (row,) = [r for r in explain(decoder(moe("three", bias=bias))).rows if r.what == "experts"]
        assert (row.op, row.kernel) == ("moe_experts", "csrc/moe/fused_experts")


REFUSED: dict[str, Any] = {
    "MoE moe: clamp is .*, expected None or two positive": lambda: moe("each", clamp=(1.0, 0.0)),
    "MoE moe: interleaved is set, expected stacked experts": lambda: moe("each", interleaved=True),
    "MoE moe: interleaved is set, expected .* one name": lambda: moe("three", interleaved=True),
    "MoE moe: names is .* without {}": lambda: moe("each", stacked=True),
    "MoE moe: names is .* with {}": lambda: moe("three", stacked=False),
    "Linear x: stacked is set, expected experts": lambda: Linear(8, (Part("x", 8),), stacked=True),
    "Linear x: stacked is set, .* no TRANSPOSE": lambda: Linear(8, (Part("x", 8),), experts=2, transform=Transform.TRANSPOSE, stacked=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


class Grouped(Format):
    """A format whose grouped product knows no biases."""

    name = "grouped"

    def tensors(self, weight: Weight) -> dict[str, Weight]:
        return {"weight": weight}


def test_a_format_without_a_bias_is_refused() -> None:
    spec = decoder(moe("three", bias=True))
    state, plan_ = random_state(spec), (("*.experts.*", Grouped()),)
    with pytest.raises(ValueError, match="the experts of layer.moe have a bias or a clamp, which the format grouped lacks"):
        bind(spec, state, quant=plan_)
