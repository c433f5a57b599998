"""Mixtral and Ministral against transformers, and their config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.layers import MoE
from pyllm.models import spec_from_config
from tests.models import oracle
from tests.models.published import split_experts

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", dict(num_local_experts=6)),
    "mixtral-window-tied": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=12, tie_word_embeddings=True)),
    "mixtral-top1-head-dim": ("Mixtral", dict(num_local_experts=3, num_experts_per_tok=1, head_dim=24, num_key_value_heads=1)),
    "ministral": ("Ministral", dict(sliding_window=12)),
    "ministral-mixed": ("Ministral", dict(sliding_window=12, layer_types=["full_attention", "sliding_attention"] * 2)),
    "ministral-full-tied": ("Ministral", dict(layer_types=["full_attention"] * 4, tie_word_embeddings=True, head_dim=24)),
}
FILE: dict[str, Any] = dict(
    architectures=["MixtralForCausalLM"], hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=16, vocab_size=50
)  # fmt: skip


def make(name: str) -> oracle.Made:
    model, config, state = oracle.make(name, *CASES[name])
    return model, config, split_experts(state, "block_sparse_moe", ("w1", "w3", "w2"))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


def test_what_mixtral_files_leave_out() -> None:
    spec = spec_from_config(FILE)
    moe, attn, norm = spec.subs[1].body, spec.attns()[0][1], spec.norm
    assert isinstance(moe, MoE) and norm is not None
    assert (moe.experts, moe.top_k, moe.renormalize) == (8, 2, True)
    assert (attn.kv_heads, attn.window, attn.rope and attn.rope.theta, norm.eps) == (8, None, 1e6, 1e-5)
    for said in ({"num_local_experts": 8}, {"num_experts": 8}, {"num_local_experts": 8, "num_experts": None}):
        assert spec == spec_from_config(FILE | said)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_local_experts": 8, "num_experts": 4}, "num_local_experts is 8, but num_experts is 4"),
     ({"num_local_experts": None, "num_experts": None}, "num_experts is None, expected a positive integer"),
     ({"num_local_experts": 10**9}, "num_experts is 1000000000, expected at most 4096"),
     ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, expected a positive integer")],
)  # fmt: skip
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        spec_from_config(FILE | changes)
