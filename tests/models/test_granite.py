"""Granite against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

FACTORS = dict(embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1, logits_scaling=8.0)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("Granite", FACTORS),
    "granite-plain": ("Granite", {}),
    "granite-bias": ("Granite", FACTORS | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "granite-head-dim": ("Granite", FACTORS | dict(hidden_size=96, head_dim=24, num_key_value_heads=1, logits_scaling=0.3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_and_separate_ops(name: str) -> None:
    oracle.check_two_ranks_and_separate_ops(oracle.make(name, *CASES[name]))


CONFIG: dict[str, Any] = dict(architectures=["GraniteForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                              num_attention_heads=4, num_key_value_heads=4, vocab_size=50)  # fmt: skip


def test_a_factor_that_is_absent_is_one() -> None:
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    spec = spec_from_config(CONFIG)
    assert spec == spec_from_config(CONFIG | dict.fromkeys(names, 1.0))
    assert (spec.embed_scale, spec.logit_scale, spec.attns()[0][1].scale, {s.scale for s in spec.subs}) == (1.0, 1.0, 1.0, {1.0})


@pytest.mark.parametrize("name", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"])
@pytest.mark.parametrize("value", [0, None, "1", float("inf")])
def test_a_factor_is_a_positive_number(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"config: {name} is {value!r}, expected a positive number"):
        spec_from_config(CONFIG | {name: value})
