"""StableLM against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm": ("StableLm", {}),
    "stablelm-bias": ("StableLm", dict(use_qkv_bias=True, tie_word_embeddings=True)),
    "stablelm-parallel": ("StableLm", dict(use_parallel_residual=True, use_qkv_bias=True, num_key_value_heads=4)),
    "stablelm-half-rotary": ("StableLm", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5))),
    "stablelm-head-dim": ("StableLm", dict(hidden_size=96, head_dim=24, layer_norm_eps=1e-2, num_key_value_heads=1)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


CONFIG: dict[str, Any] = dict(architectures=["StableLmForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                              num_attention_heads=4, num_key_value_heads=4, vocab_size=50)  # fmt: skip


def test_a_quarter_of_a_head_is_rotated_unless_a_file_says_otherwise() -> None:
    dims = [spec_from_config(CONFIG | c).attns()[0][1].rope.dim for c in ({}, {"partial_rotary_factor": 0.5})]
    assert dims == [4, 8]


def test_a_layer_norm_for_each_head_is_refused() -> None:
    with pytest.raises(ValueError, match="config: qk_layernorm is set, expected q and k without a LayerNorm for each head"):
        spec_from_config(CONFIG | {"qk_layernorm": True})
