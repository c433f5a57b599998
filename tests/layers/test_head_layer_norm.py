"""A LayerNorm for each head of q and k, with weights of its own: against a formula in fp64, what explain says of it, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from pyllm.layers import LayerNorm, plan
from pyllm.plan.explain import explain
from tests.layers.test_variants import DIM, HEADS, KV, State, attention, attn, check, decoder

EPS = 1e-3
NORM = LayerNorm("{}_norm", DIM, EPS, bias=False)


@pytest.mark.parametrize("plus_one", [False, True])
def test_q_and_k(plus_one: bool) -> None:
    def formula(st: State, x: Tensor) -> Tensor:
        def turn(t: Tensor) -> Tensor:  # without a rope, the heads tell q from k
            weight = st[f"layer.attn.{'q' if t.shape[1] == HEADS else 'k'}_norm.weight"]
            return F.layer_norm(t, (DIM,), eps=EPS) * (weight + 1 if plus_one else weight)

        return attention(st, x, turn)

    norm = LayerNorm("{}_norm", DIM, EPS, bias=False, plus_one=plus_one)
    check(decoder(attn(qk_norm=norm)), formula)


def test_weights_and_rows() -> None:
    spec = decoder(attn(qk_norm=NORM))
    shapes = {item.sources[0]: item.shape for item in plan(spec, tp=2) if "norm" in item.sources[0]}
    assert shapes == {"layer.attn.q_norm.weight": (HEADS // 2, DIM), "layer.attn.k_norm.weight": (KV // 2, DIM)}
    for fuse in (True, False):
        ops = [(r.what, r.kernel) for r in explain(spec, fuse=fuse).rows if "_norm" in r.what]
        assert ops == [(f"{name}_norm{tail}", "torch") for name in "qk" for tail in ("", " in place")]


REFUSED: dict[str, Any] = {
    "LayerNorm n: heads is 2, expected bias=False": lambda: LayerNorm("n", 8, EPS, heads=2),
    "Attn attn: qk_norm is a LayerNorm, expected bias=False and no whole_norm": lambda: attn(qk_norm=LayerNorm("n", DIM, EPS)),
    "Attn attn: qk_norm is a LayerNorm, .* no whole_norm": lambda: attn(qk_norm=NORM, whole_norm=True),
    "Attn attn: qk_norm.d is 8": lambda: attn(qk_norm=LayerNorm("n", 8, EPS, bias=False)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
