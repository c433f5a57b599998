"""What Llama 4 brought: experts whose input is weighted, and norms of q and k without a weight; against formulas in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm.layers import MoE, RMSNorm, plan
from tests.layers.test_variants import DIM, FF, State, attention, attn, check, decoder, ffn
from tests.layers.test_variants import D as WIDTH

EPS = 1e-3


def test_the_weight_multiplies_the_input() -> None:
    spec = MoE("moe", WIDTH, FF, 6, 1, scoring="sigmoid", renormalize=False, scale_inputs=True)

    def formula(st: State, x: Tensor) -> Tensor:
        score, ids = (x @ st["layer.moe.gate.weight"].T).sigmoid().max(-1)
        return torch.stack([ffn(st, h * w, f"layer.moe.experts.{e}", "silu") for h, w, e in zip(x, score, ids.tolist(), strict=True)])

    check(decoder(spec), formula)


def test_a_norm_without_a_weight() -> None:
    def formula(st: State, x: Tensor) -> Tensor:
        return attention(st, x, lambda t: t / (t.pow(2).mean(-1, keepdim=True) + EPS).sqrt())

    spec = decoder(attn(qk_norm=RMSNorm("{}_norm", DIM, EPS, stored=False)))
    assert not [s for item in plan(spec) for s in item.sources if "norm" in s]
    check(spec, formula)


REFUSED: dict[str, Any] = {
    "MoE m: top_k is 2, expected 1 with scale_inputs": lambda: MoE("m", 8, 8, 4, 2, scale_inputs=True),
    "RMSNorm n: stored is off, expected neither plus_one nor unit": lambda: RMSNorm("n", 8, EPS, plus_one=True, stored=False),
    "RMSNorm n: stored is off": lambda: RMSNorm("n", 8, EPS, unit=4, stored=False),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
