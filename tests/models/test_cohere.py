"""Cohere against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {}),
    "cohere-untied": ("Cohere", dict(tie_word_embeddings=False, logit_scale=0.8, num_key_value_heads=4)),
    "cohere-bias": ("Cohere", dict(attention_bias=True, layer_norm_eps=1e-2)),
    "cohere-qk-norm": ("Cohere", dict(use_qk_norm=True)),
    "cohere-qk-norm-mha-bias": ("Cohere", dict(use_qk_norm=True, num_key_value_heads=4, attention_bias=True, layer_norm_eps=1e-2)),
    "cohere-qk-norm-mqa": ("Cohere", dict(use_qk_norm=True, num_key_value_heads=1)),
    "cohere-head-dim": ("Cohere", dict(hidden_size=96, head_dim=24, num_key_value_heads=1)),
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


CONFIG: dict[str, Any] = dict(architectures=["CohereForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                              num_attention_heads=4, num_key_value_heads=4, vocab_size=50)  # fmt: skip


def test_what_a_file_leaves_out() -> None:
    spec = spec_from_config(CONFIG)
    rope = spec.attns()[0][1].rope
    assert (spec.head, spec.logit_scale, rope.theta, rope.interleaved, spec.max_positions) == (None, 0.0625, 5e5, True, 8192)


def test_a_layer_norm_for_each_head_is_refused_where_it_is_not_read() -> None:
    assert spec_from_config(CONFIG | {"use_qk_norm": True}).attns()[0][1].qk_norm is not None
    with pytest.raises(ValueError, match="config: use_qk_norm is set, expected q and k without a LayerNorm for each head"):
        spec_from_config(CONFIG | {"use_qk_norm": True, "architectures": ["LlamaForCausalLM"]})
