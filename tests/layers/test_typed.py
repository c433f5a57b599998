"""Every field of every declaration, given each of many wrong things: it is taken, and then the model is bound and explained, or it is one
sentence that names the layer and the field."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyllm.layers
from pyllm.api.dummy import DummyWeights
from pyllm.layers import (
    MLA,
    MLP,
    Attn,
    Decoder,
    DynamicNtk,
    Embedding,
    LayerNorm,
    Linear,
    LinearScaling,
    Llama3,
    LongRope,
    MoE,
    Part,
    RMSNorm,
    Rope,
    Spec,
    Sub,
    Sum,
    Yarn,
    bind,
    plan,
)
from pyllm.layers.typed import Typed
from pyllm.plan.explain import explain
from tests.support.wrong import complaints

NORM, ATTN, EMBED = RMSNorm("n", 64, 1e-6), Attn("a", 64, 4, 2, 16, kv=0), Embedding("e", 10, 64)
GOOD: dict[type, dict[str, Any]] = {
    Attn: {"at": "a", "d": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "kv": 0, "rope": Rope(16)},
    RMSNorm: {"name": "n", "d": 64, "eps": 1e-6},
    LayerNorm: {"name": "n", "d": 64, "eps": 1e-6},
    Embedding: {"name": "e", "vocab": 10, "d": 64},
    MoE: {"at": "m", "d": 64, "ff": 16, "experts": 4, "top_k": 2},
    MLP: {"at": "m", "d": 64, "ff": 16},
    MLA: {"at": "a", "d": 64, "heads": 4, "kv_heads": 4, "head_dim": 32, "kv": 0, "rope": Rope(16), "kv_rank": 16, "v_dim": 16},
    Rope: {"dim": 16},
    Sub: {"at": "s", "pre": NORM, "body": ATTN},
    Sum: {"branches": (ATTN,)},
    Decoder: {"embed": EMBED, "subs": (Sub("s", NORM, ATTN),), "norm": NORM},
    Part: {"name": "p", "size": 8},
    Linear: {"d": 64, "parts": (Part("x", 8),)},
    LinearScaling: {"factor": 2.0},
    DynamicNtk: {"factor": 2.0, "original": 64},
    Llama3: {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 64},
    Yarn: {"factor": 2.0, "original": 64},
    LongRope: {"short": (1.0,) * 8, "long": (1.0,) * 8, "original": 64, "factor": 2.0},
}
FIELDS = [pytest.param(cls, f.name, id=f"{cls.__name__}-{f.name}") for cls in GOOD for f in dataclasses.fields(cls)]
WORDS = {"own_kv": "KV slot 0", "start": "Part p: rows", "of": "Part p: rows", "size": "rows", "low_freq_factor": "high_freq_factor"}
"""What an error names in place of a field: what follows from it."""


def model(part: Any) -> Spec:
    """The smallest declaration that has this in it."""
    if isinstance(part, (LinearScaling, DynamicNtk, Llama3, Yarn, LongRope)):
        part = Rope(16, scaling=part)
    if isinstance(part, Rope):
        part = replace(ATTN, rope=part)
    if isinstance(part, Part):
        part = Linear(64, (part,))
    if isinstance(part, (Attn, MLP, MoE, Sum)):
        part = Sub("s", NORM, part)
    if isinstance(part, (RMSNorm, LayerNorm)):
        part = Sub("s", part, ATTN)
    return Decoder(EMBED, (part,), NORM) if isinstance(part, Sub) else part


@pytest.mark.parametrize(("cls", "field"), FIELDS)
def test_a_field(cls: type, field: str) -> None:
    def use(value: Any) -> None:
        spec = model(cls(**GOOD[cls] | {field: value}))
        plan(spec)
        hash(spec)
        repr(spec)
        if isinstance(spec, Decoder):
            explain(spec)
        bind(spec, DummyWeights(spec))

    # A name that cannot be written down, and a latent of a width that no op serves, are found by `bind`.
    failed = complaints(
        use, rf"^(Rope: )?{cls.__name__}\b.*\b{field}\b|surrogates|^bind: .*layernorm: d is|RMSNorm .*eps|{WORDS.get(field, field)}"
    )
    assert not failed, failed


def test_all_declarations_are_tested() -> None:
    known = {c for c in vars(pyllm.layers).values() if isinstance(c, type) and issubclass(c, Typed) and dataclasses.is_dataclass(c)}
    assert {c.__name__ for c in known} - {"Weight", "PlanItem"} == {c.__name__ for c in GOOD}


@dataclass(frozen=True)
class Own(Spec):
    """A caller's own layer."""

    name: str
    d: int
    factor: float = 1.0
    inner: tuple[Linear, ...] = ()
    anything: Any = None

    def forward(self, m: Any, x: Tensor, b: Any) -> Tensor:
        return x * self.factor


def test_a_layer_of_ones_own_is_looked_at_too() -> None:
    assert Own("o", 8, 2, (Linear(8, (Part("x", 8),)),), anything=object()).factor == 2
    with pytest.raises(ValueError, match=r"^Own o: d is '8', expected int$"):
        Own("o", "8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^Own: name is 3, expected str$"):
        Own(3, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^Own o: inner is a tuple holding 3, expected a tuple of Linear$"):
        replace(Own("o", 8), inner=(3,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^Own o: factor is True, expected float$"):
        Own(factor=True, name="o", d=8)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'd'"):
        Own("o")  # type: ignore[call-arg]


def test_annotations_that_mean_nothing_here_are_nobodys_error() -> None:
    @dataclass(frozen=True)
    class Elsewhere(Spec):
        d: Nowhere  # type: ignore[name-defined]  # noqa: F821

    class Handmade(Own):
        def __init__(self, size: list[int]) -> None:
            super().__init__("o", size[0])

    assert Elsewhere("x").d == "x"
    assert Handmade([8]).d == 8


def test_declarations_are_copied_as_before() -> None:
    for part in (Attn(**GOOD[Attn]), Decoder(**GOOD[Decoder])):
        assert copy.deepcopy(part) == copy.copy(part) == pickle.loads(pickle.dumps(part)) == part  # noqa: S301
    assert torch.equal(*(bind(NORM, {"n.weight": torch.ones(64)}).weight for _ in range(2)))
