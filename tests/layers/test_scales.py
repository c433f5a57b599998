"""Factors of a step and of the logits, and LayerNorm weights stored as w - 1: formulas, ranks, explain and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyllm.layers import MLP, Decoder, LayerNorm, RMSNorm, Sub, Sum
from pyllm.layers.spec import Spec
from pyllm.plan.explain import explain
from tests.layers.custom import FF, VOCAB, D, random_state
from tests.layers.test_custom import IDS as SHORT
from tests.layers.test_custom import Scale
from tests.layers.test_tensor_parallel import run_ranks
from tests.layers.test_variants import EPS, IDS, State, attn, check, decoder, loud, run


class Same(Spec):
    """Gives the residual itself, not a copy."""

    def forward(self, m: Any, x: Tensor, b: Any) -> Tensor:
        return x


def mlp(st: State, x: Tensor) -> Tensor:
    gate, up, down = (st[f"layer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def scaled(body: Spec, post: Any = None, scale: float = 0.3, **fields: Any) -> Decoder:
    spec = decoder(body, **fields)
    return replace(spec, subs=(replace(spec.subs[0], post=post, scale=scale),))


def test_layer_norm_stored_minus_one() -> None:
    def formula(st: State, x: Tensor) -> Tensor:
        return mlp(st, F.layer_norm(x, (D,), st["layer.ln.weight"] + 1, st["layer.ln.bias"], EPS))

    check(decoder(MLP("mlp", D, FF), LayerNorm("ln", D, EPS, plus_one=True)), formula)


def test_the_factor_of_a_step_comes_after_its_norm() -> None:
    def formula(st: State, x: Tensor) -> Tensor:
        y = mlp(st, x)
        return 0.3 * y / (y.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * st["layer.post.weight"]

    check(scaled(MLP("mlp", D, FF), RMSNorm("post", D, EPS)), formula)
    check(scaled(MLP("mlp", D, FF)), lambda st, x: 0.3 * mlp(st, x))


def test_a_body_may_give_the_residual_itself() -> None:
    check(scaled(Same()), lambda st, x: 0.3 * x)


def test_the_factor_of_the_logits_comes_before_the_cap() -> None:
    spec = decoder(MLP("mlp", D, FF), logit_scale=0.25, logit_softcap=3.0)
    state = loud(spec)
    st = {k: v.double() for k, v in state.items()}
    x = st["embed.weight"][IDS]
    raw = (x + mlp(st, x)) @ st["embed.weight"].T
    for fuse in (True, False):  # the cap has a slope of at most 1: the bound of the raw logits, as in `check`
        got, limit = run(spec, state, fuse).double(), 3e-5 * raw.abs().max().item()
        torch.testing.assert_close(got, 3 * torch.tanh(raw / 4 / 3), rtol=0, atol=limit)


def test_ranks_agree_with_one_rank() -> None:
    """A step that is a partial sum, one that each rank has in full, and the factor of a padded vocabulary (50 over 4 ranks)."""
    first = Sub("layer", LayerNorm("ln", D, EPS, plus_one=True), Sum((attn(), MLP("mlp", D, FF))), scale=0.3)
    second = Sub("model.extra", None, Scale("mine", D), scale=0.7)
    spec = replace(decoder(MLP("mlp", D, FF), logit_scale=0.25), subs=(first, second))
    assert VOCAB % 4
    state = random_state(spec, 7)
    (one,) = run_ranks(spec, state, 1)
    for got in run_ranks(spec, state, 4):  # fp32 sums of 4 partial sums in another order: a few roundings of 2^-24
        torch.testing.assert_close(got, one, rtol=0, atol=3e-6 * one.abs().max().item())
    assert len(one) == len(SHORT)


@pytest.mark.parametrize("fuse", [True, False])
def test_explain_has_a_row_for_each_factor_and_none_for_one(fuse: bool) -> None:
    plain = decoder(MLP("mlp", D, FF))
    with_factors = scaled(MLP("mlp", D, FF), logit_scale=0.25)
    before, after = (explain(s, batch=3, context=8, new=2, fuse=fuse).rows for s in (plain, with_factors))
    muls = [(r.what, r.bytes) for r in after if r.op == "mul"]
    assert muls == [("scale 0.3", 2 * 6 * D * 2), ("scale 0.25", 2 * 3 * VOCAB * 2)]
    assert [r for r in after if r.op != "mul"] == list(before)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), None, True, "2"])
def test_a_factor_is_a_positive_number(value: Any) -> None:
    body = MLP("mlp", D, FF)
    for owner, name, make in (
        ("Sub layer", "scale", lambda: scaled(body, scale=value)),
        ("Decoder", "logit_scale", lambda: decoder(body, logit_scale=value)),
        ("Decoder", "embed_scale", lambda: decoder(body, embed_scale=value)),
    ):
        with pytest.raises(ValueError, match=f"{owner}: {name} is {value!r}, expected (a positive number|float)"):
            make()
