"""The quant plan that takes a checkpoint's FP8 products as they are stored: the tensors beside each weight decide, not the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pyllm.layers.formats import Format, QuantPlan
from pyllm.layers.fp8 import Fp8
from pyllm.layers.fp8_stored import ActScale, BlockScale, stored_scale
from pyllm.layers.linear import Linear
from pyllm.layers.spec import Spec, Weight, walk


def as_stored(spec: Spec, state: Mapping[str, Tensor]) -> QuantPlan:
    """One entry for each product whose parts are all stored in e4m3: `Fp8(granularity="block")` beside scales by blocks, else
    `Fp8(activation="static")` where all parts have an `input_scale`, else `Fp8()`. The rest is left to the model's dtype, and so are
    experts by blocks and parts that share a block: they are expanded as they are read.

    state: of tensors by checkpoint name; a tensor's shape is all that is looked at."""
    prefix = getattr(spec, "prefix", "")
    plan: list[tuple[str, Format | None]] = []
    for path, node in walk(spec):
        if isinstance(node, Linear):
            fmt = _format(node, path, state, prefix)
            plan += [(name, fmt) for name in dict.fromkeys(node.names(path)) if fmt is not None]
    return tuple(plan)


def _format(linear: Linear, path: str, state: Mapping[str, Tensor], prefix: str) -> Format | None:
    def held(weight: Weight) -> list[tuple[str, tuple[int, ...] | None]]:
        found = []
        for name in weight.sources(path):
            there: Any = next((n for n in (name, name.removeprefix(f"{prefix}.")) if n in state), None)
            found.append((name, None if there is None else tuple(state[there].shape)))
        return found

    weight = linear.weights()["weight"]
    blocks = stored_scale(weight, "block", held)
    if isinstance(blocks, BlockScale):
        return Fp8(granularity="block") if blocks.aligned() else None
    if stored_scale(weight, "channel", held) is None:
        return None
    static = not linear.experts and all(shape is not None for _, shape in held(ActScale.of(weight)))
    return Fp8(activation="static") if static else Fp8()
