"""The rotary fields of config.json, in their old and new places -> a `Rope`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pyllm.layers import DynamicNtk, LinearScaling, Llama3, LongRope, Rope, Yarn
from pyllm.layers.rope import Scaling
from pyllm.models import fields
from pyllm.models.fields import warn_unread

ROPE = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "max_position_embeddings",
}  # fmt: skip
TOP = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Outside of `rope_parameters` in old files."""


def check_places(config: Mapping[str, Any]) -> None:
    """What a file says of its rope in two places must be one thing: which of the two another reader takes is nobody's guess."""
    said: dict[str, tuple[str, Any]] = {}
    for place in ("rope_scaling", "rope_parameters", ""):
        found = config.get(place) if place else {n: config.get(n) for n in TOP}
        if not isinstance(found, dict) or any(isinstance(v, dict) for v in found.values()):
            continue
        for name, value in found.items():
            field, value = ("rope_type", "longrope" if value == "su" else value) if name in ("type", "rope_type") else (name, value)
            if value is None:
                continue
            where = f"{place}: {name}" if place else name
            other, before = said.setdefault(field, (where, value))
            if before != value:
                raise ValueError(f"config: {other} is {before!r}, but {where} is {value!r}")


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (new), or `rope_theta` + `rope_scaling` + `partial_rotary_factor` (old), as one dict without nulls."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"config: {name} is {value!r}, expected an object")
        nested = [k for k, v in (value or {}).items() if isinstance(v, dict)]
        if value and config.get("rope_local_base_freq") and set(value) <= {"full_attention", "sliding_attention"}:
            value = value.get("full_attention")
        elif nested:
            raise ValueError(f"config: {name} has parameters per layer type ({', '.join(nested)}), expected one set for all layers")
        found |= {k: v for k, v in (value or {}).items() if v is not None}
    for name in TOP:
        if config.get(name) is not None:
            found.setdefault(name, config[name])
    return found


def local(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as the windowed layers of a model with two ropes read it."""
    p = config.get("rope_parameters")
    own = p.get("sliding_attention") if isinstance(p, dict) else None
    return {**config, "rope_theta": config["rope_local_base_freq"], "rope_scaling": None, "rope_parameters": {"full_attention": own}}


def _positions(count: float) -> int:
    most = fields.LIMITS["max_position_embeddings"]
    if not 1 <= count <= most:
        raise ValueError(f"config: rope_parameters make {count:g} positions, expected 1 to {most}")
    return int(count)


def rope(config: Mapping[str, Any], c: SimpleNamespace) -> Rope:
    p, longest = _rope_fields(config), c.max_position_embeddings
    kind = p.get("rope_type", p.get("type", "default"))

    def number(name: str, default: float | None = None) -> float:
        if name not in p and default is None:
            raise ValueError(f"config: rope_parameters of type {kind!r} have no {name!r}")
        return fields.number(p, name, default, "config: rope_parameters")

    def factors(name: str) -> tuple[float, ...]:
        value = p.get(name)
        if not isinstance(value, list) or not all(type(x) in (int, float) and fields.LEAST <= x <= fields.MOST for x in value):
            raise ValueError(f"config: rope_parameters: {name} is {value!r}, expected a list of positive numbers")
        return tuple(map(float, value))

    def maybe(name: str) -> float | None:
        return number(name) if name in p else None

    original = _positions(number("original_max_position_embeddings", longest))
    scaling: Scaling | None
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(number("factor"))
        longest = _positions(longest * scaling.factor)
    elif kind == "dynamic":
        scaling = DynamicNtk(number("factor"), longest)
        longest = _positions(longest * scaling.factor)
    elif kind == "llama3":
        scaling = Llama3(number("factor"), number("low_freq_factor"), number("high_freq_factor"), original)
    elif kind == "yarn":
        scaling = Yarn(
            number("factor", longest / original), original, number("beta_fast", 32.0), number("beta_slow", 1.0),
            maybe("attention_factor"), maybe("mscale"), maybe("mscale_all_dim"), fields.flag({"truncate": True} | p, "truncate"),
        )  # fmt: skip
        longest = max(longest, _positions(original * scaling.factor))
    elif kind in ("longrope", "su"):
        factor = number("factor", longest / original)
        scaling = LongRope(factors("short_factor"), factors("long_factor"), original, factor, maybe("attention_factor"))
    else:
        raise ValueError(f"config: rope_type is {kind!r}, expected default, linear, dynamic, llama3, yarn or longrope")
    beta = "llama_4_scaling_beta"
    c.llama_4_scaling_beta = maybe(beta) if c.reads_beta else None
    warn_unread((k for k in p if k not in ROPE | ({beta} if c.reads_beta else set())), "config: rope_parameters")
    dim = c.rotary_dim or int(min(c.head_dim * number("partial_rotary_factor", 1.0), 1e9))
    if dim % 2 or not 0 < dim <= c.head_dim:
        raise ValueError(f"config: head_dim is {c.head_dim}, of which {dim} are rotated, expected an even number from 2 to head_dim")
    return Rope(dim, number("rope_theta", 1e4), longest, scaling)


def long_scale(rope: Rope) -> float:
    """Factor of the scores of models whose YaRN has an `mscale_all_dim` (DeepSeek): the square of what others put on cos and sin."""
    s = rope.scaling
    return (0.1 * s.mscale_all_dim * math.log(s.factor) + 1) ** 2 if isinstance(s, Yarn) and s.mscale_all_dim and s.factor > 1 else 1.0
