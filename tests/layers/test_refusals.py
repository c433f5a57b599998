"""Declarations, plans and arguments that would give a wrong model are errors that name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pyllm.api.dummy import DummyWeights
from pyllm.layers import (
    MLP,
    Attn,
    Decoder,
    Dense,
    DynamicNtk,
    Embedding,
    Fp8,
    LayerNorm,
    Linear,
    LinearScaling,
    Llama3,
    LongRope,
    MoE,
    Part,
    RMSNorm,
    Rope,
    Sub,
    Sum,
    bind,
    plan,
    rewrite,
)
from pyllm.plan.explain import explain
from tests.layers.custom import D, mine, random_state
from tests.layers.test_custom import IDS
from tests.models.paged import Paged

BF16 = Dense(torch.bfloat16)
ONE = Linear(4, (Part("x", 4),))


def attn(**changes: Any) -> Attn:
    return replace(Attn("a", D, 4, 2, 16, kv=0), **changes)


def decoder(body: Any = None, **fields: Any) -> Decoder:
    return Decoder(Embedding("e", 50, D), (Sub("l", None, body or attn()),), None, **fields)


def bound(**options: Any) -> Any:
    return bind(mine(), random_state(mine()), **options)


CASES: dict[str, Callable[[], Any]] = {
    "Attn a: kv_heads is 0, expected a positive integer": lambda: attn(kv_heads=0),
    "Attn a: head_dim is 0": lambda: attn(head_dim=0),
    "Attn a: head_dim is 17, expected a multiple of 8, at most 256": lambda: attn(head_dim=17),
    "Attn a: head_dim is 512, expected a multiple of 8": lambda: attn(head_dim=512),
    "Attn a: softcap is -1.0, expected None or more than 0": lambda: attn(softcap=-1.0),
    "Attn a: window is 3.5, expected int or None": lambda: attn(window=3.5),
    "Attn a: window is '8', expected int or None": lambda: attn(window="8"),
    "Attn a: scale is nan, expected a positive number": lambda: attn(scale=float("nan")),
    "Attn a: scale is 0.0, expected a positive number": lambda: attn(scale=0.0),
    "Attn a: kv is '0', expected int": lambda: attn(kv="0"),
    "Attn a: rope is 16, expected Rope or None": lambda: attn(rope=16),
    "Attn a: names is": lambda: attn(names=("q",)),
    "Attn a: qk_norm is a LayerNorm, expected bias=False": lambda: attn(qk_norm=LayerNorm("{}_norm", 16, 1e-5)),
    "RMSNorm n: eps is -1": lambda: RMSNorm("n", 4, -1.0),
    "MLP m: ff is 0": lambda: MLP("m", 4, 0),
    "MoE m: names is .* with {} for the expert": lambda: MoE("m", 8, 8, 4, 2, names=("g", "u", "d")),
    "Linear x: experts is 2, expected {}": lambda: Linear(8, (Part("x", 8),), experts=2),
    "Linear: parts is empty": lambda: Linear(4, ()),
    "Part x: rows 6..10 are outside the 8 of the tensor": lambda: Part("x", 4, start=6, of=8),
    "Part x: rows 2..6 are outside the 4 of the tensor": lambda: Part("x", 4, start=2),
    "Part x: unit is 0": lambda: Part("x", 4, 0),
    "Embedding e: vocab is 0": lambda: Embedding("e", 0, 4),
    "Rope: theta is 0.0": lambda: Rope(16, 0.0),
    "Rope: max_positions is 0": lambda: Rope(16, max_positions=0),
    "Rope: LinearScaling.factor is 0": lambda: Rope(16, scaling=LinearScaling(0)),
    "Rope: DynamicNtk.original is 0": lambda: Rope(16, scaling=DynamicNtk(2, 0)),
    "Rope: dim is 2, expected at least 4": lambda: Rope(2, scaling=DynamicNtk(2, 64)),
    "Rope: Llama3.high_freq_factor is 3, expected 4 or more": lambda: Rope(16, scaling=Llama3(8, 4, 3, 64)),
    "Rope: LongRope.original is 1": lambda: Rope(4, scaling=LongRope((1.0, 1.0), (1.0, 1.0), 1, 4)),
    "Rope: scaling is 'linear'": lambda: Rope(16, scaling="linear"),  # type: ignore[arg-type]
    "Sub x: body is None": lambda: Sub("x", None, None),  # type: ignore[arg-type]
    "Sum: branches is \\(\\), expected a tuple of layers, at least one": lambda: Sum(()),
    "Sum: branches is a list holding a Attn, expected a tuple of Spec": lambda: Sum([attn()]),  # type: ignore[arg-type]
    "Decoder: subs is a list, expected a tuple of Sub": lambda: replace(decoder(), subs=[]),  # type: ignore[arg-type]
    "Decoder: max_positions is 0": lambda: decoder(max_positions=0),
    "Decoder: logit_softcap is -3.0": lambda: decoder(logit_softcap=-3.0),
    "Decoder: MLP of l has d=32, expected 64": lambda: decoder(MLP("m", 32, 8)),
    "Decoder: RMSNorm of norm has d=32, expected 64": lambda: replace(decoder(), norm=RMSNorm("n", 32, 1e-5)),
    "Decoder: Linear of head has d=32": lambda: decoder(head=Linear(32, (Part("h", 50),), "col")),
    "Decoder: head has 40 rows": lambda: decoder(head=Linear(D, (Part("h", 40),), "col")),
    "l.a: rope.max_positions is 32, expected max_positions=8192": lambda: decoder(attn(rope=Rope(16, max_positions=32))),
    "Decoder: positions has 8 rows, expected max_positions=8192": lambda: decoder(positions=Embedding("p", 8, D)),
    "rewrite: fn gave None for model.layers.0.mlp": lambda: rewrite(mine(), MLP, lambda m: None),  # type: ignore[arg-type]
    "rewrite: cls is 'MLP', expected type": lambda: rewrite(mine(), "MLP", lambda m: m),  # type: ignore[arg-type]
    "plan: tp is 0": lambda: plan(mine(), tp=0),
    "bind: tp is 0": lambda: bound(tp=0),
    "bind: tp is 2.0": lambda: bound(tp=2.0),
    "bind: device is 'gpu', expected one of torch's": lambda: bound(device="gpu"),
    "bind: state is None, expected a dict of Tensor": lambda: bind(mine(), None),  # type: ignore[arg-type]
    "bind: strict is 'no', expected bool": lambda: bound(strict="no"),
    "bind: rank is '0', expected int": lambda: bound(rank="0"),
    "plan: spec is 3, expected Spec": lambda: plan(3),  # type: ignore[arg-type]
    "rewrite: spec is None, expected Spec": lambda: rewrite(None, MLP, lambda m: m),  # type: ignore[arg-type, return-value, type-var]
    "rewrite: fn is 'f', expected Callable": lambda: rewrite(mine(), MLP, "f"),  # type: ignore[arg-type]
    "explain: kv_dtype is 'fp8', expected dtype or None": lambda: explain(mine(), kv_dtype="fp8"),  # type: ignore[arg-type]
    "explain: gpu is a list, expected str": lambda: explain(mine(), gpu=[]),  # type: ignore[arg-type]
    "bind: dtype is 'bf16'": lambda: bound(dtype="bf16"),
    "bind: dtype is torch.int8": lambda: bound(dtype=torch.int8),
    "bind: spec is 3": lambda: bind(3, {}),  # type: ignore[arg-type]
    "checkpoint tensor 'x.weight' is a ndarray, expected a Tensor": lambda: bind(ONE, {"x.weight": np.zeros((4, 4))}),  # type: ignore[dict-item]
    "checkpoint tensor 'x.weight' is on the meta device": lambda: bind(ONE, {"x.weight": torch.zeros(4, 4, device="meta")}),
    r"quant plan: x is \[4, 4\], which fp8 does not multiply; expected multiples of 16": lambda: bind(
        ONE, {"x.weight": torch.zeros(4, 4)}, quant=(("*", Fp8()),)
    ),
    r"quant plan: l.m.down_proj is \[64, 24\], which fp8 does not": lambda: bind(
        decoder(MLP("m", D, 24)), DummyWeights(decoder(MLP("m", D, 24))), quant=(("*_proj", Fp8()),)
    ),
    r"bind: quant has '\*.o_proj.weight', which matches no product": lambda: bound(quant=(("*.o_proj.weight", BF16),)),
    "explain: quant has 'x', which matches no product": lambda: explain(mine(), quant=(("x", BF16),)),
    r"bind: quant gives '\*' the format 'fp8', expected a Format": lambda: bound(quant=(("*", "fp8"),)),
    "bind: quant is a dict, expected a list of": lambda: bound(quant={"*": BF16}),
    "bind: quant is None, expected a list of": lambda: bound(quant=None),
    r"experts of model.layers.1.moe get two formats \(model, bf16\)": lambda: bound(quant=(("*.experts.*down_proj", BF16),)),
    "explain: tp is '2'": lambda: explain(mine(), tp="2"),  # type: ignore[arg-type]
    "explain: spec is 3, expected Decoder": lambda: explain(3),  # type: ignore[arg-type]
    "explain: dtype is 'bf16'": lambda: explain(mine(), dtype="bf16"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("message", CASES)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CASES[message]()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_tensors_are_not_loaded_as_plain_ones(dtype: torch.dtype) -> None:
    """Their scales are elsewhere: cast to the model's dtype they are noise."""
    with pytest.raises(ValueError, match=f"checkpoint tensor 'x.weight' is {dtype}, expected a plain floating-point type"):
        bind(Linear(4, (Part("x", 4),)), {"x.weight": torch.zeros(4, 4).to(dtype)})


def test_experts_in_a_dense_format_of_another_dtype() -> None:
    spec, state = mine(), random_state(mine())
    got = bind(spec, state, quant=(("*.experts.*", BF16),))(Paged(spec, 1, len(IDS)).step([IDS]))
    want = bind(spec, state)(Paged(spec, 1, len(IDS)).step([IDS]))
    # weights, inputs and three intermediates of 4 MoE layers are rounded to bf16 (2^-9 each): a few per cent of the largest logit
    assert 0 < (got - want).abs().max() < 20 * 2**-9 * want.abs().max()


def test_a_tied_head_has_no_format() -> None:
    head = explain(decoder(), quant=(("*", Dense(torch.float32)),)).rows[-2]
    assert (head.op, head.format) == ("linear", "")
