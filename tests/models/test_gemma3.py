"""Gemma 3 (text) against transformers, and the two forms of its config."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

LINEAR = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0), sliding_attention=dict(rope_type="default", rope_theta=1e3)
)
BASE = dict(sliding_window=12, query_pre_attn_scalar=24)
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", BASE | dict(num_hidden_layers=7)),
    "gemma3-pattern": ("Gemma3", BASE | dict(sliding_window_pattern=3, tie_word_embeddings=False)),
    "gemma3-types": ("Gemma3", BASE | dict(layer_types=TYPES, num_key_value_heads=1, head_dim=24)),
    "gemma3-cap": ("Gemma3", BASE | dict(final_logit_softcapping=3.0, sliding_window_pattern=2)),
    "gemma3-ropes": ("Gemma3", BASE | dict(sliding_window_pattern=2, rope_parameters=LINEAR, attention_bias=True)),
}


def make(name: str) -> oracle.Made:
    """The text config's class is Gemma3TextConfig, which `oracle.make` does not spell."""
    import transformers

    kind, changes = CASES[name]
    transformers.Gemma3TextForCausalLM = transformers.Gemma3ForCausalLM
    model, config, state = oracle.make(name, f"{kind}Text", changes)
    return model, config | {"architectures": ["Gemma3ForCausalLM"]}, state


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


CONFIG: dict[str, Any] = dict(architectures=["Gemma3ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=6,
                              num_attention_heads=4, vocab_size=50, head_dim=16, sliding_window=512)  # fmt: skip


def test_ropes_and_pattern_in_the_old_and_in_the_new_place() -> None:
    short = spec_from_config(CONFIG)
    old = dict(rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6, rope_scaling=None)
    ropes = {k: dict(rope_type="default", rope_theta=t) for k, t in (("full_attention", 1e6), ("sliding_attention", 1e4))}
    new = dict(rope_parameters=ropes, layer_types=["sliding_attention"] * 5 + ["full_attention"], _sliding_window_pattern=6)
    assert short == spec_from_config(CONFIG | old) == spec_from_config(CONFIG | new)
    assert [(a.window, a.rope.theta) for _, a in short.attns()] == [(512, 1e4)] * 5 + [(None, 1e6)]


def test_a_scaled_rope_is_that_of_the_full_layers_alone() -> None:
    spec = spec_from_config(CONFIG | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [a.rope.scaling is None for _, a in spec.attns()] == [True] * 5 + [False]
    assert {a.rope.max_positions for _, a in spec.attns()} == {spec.max_positions}
