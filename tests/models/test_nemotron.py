"""Nemotron against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": ("Nemotron", {}),
    "nemotron-bias": ("Nemotron", dict(attention_bias=True, mlp_bias=True, norm_eps=1e-2)),
    "nemotron-tied": ("Nemotron", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "nemotron-rotary": ("Nemotron", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0))),
    "nemotron-head-dim": ("Nemotron", dict(hidden_size=96, head_dim=24, num_key_value_heads=1)),
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


CONFIG: dict[str, Any] = dict(architectures=["NemotronForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                              num_attention_heads=4, num_key_value_heads=4, vocab_size=50)  # fmt: skip


def test_what_a_file_leaves_out() -> None:
    spec = spec_from_config(CONFIG)
    assert (spec.attns()[0][1].rope.dim, spec.subs[1].body.act, spec.norm.eps, spec.max_positions) == (8, "relu2", 1e-5, 4096)
    assert spec_from_config(CONFIG | {"norm_eps": 1e-3}).norm.eps == 1e-3
