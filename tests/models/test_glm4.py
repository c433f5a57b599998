"""GLM-4 against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4": ("Glm4", {}),
    "glm4-no-bias": ("Glm4", dict(attention_bias=False, rms_norm_eps=1e-2, num_key_value_heads=4)),
    "glm4-tied": ("Glm4", dict(tie_word_embeddings=True, head_dim=24, num_key_value_heads=1)),
    "glm4-rotary": ("Glm4", dict(rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0))),
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


CONFIG: dict[str, Any] = dict(architectures=["Glm4ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                              num_attention_heads=4, num_key_value_heads=4, vocab_size=50)  # fmt: skip


def test_what_a_file_leaves_out() -> None:
    attn = spec_from_config({k: v for k, v in CONFIG.items() if k != "num_key_value_heads"} | {"num_attention_heads": 8}).attns()[0][1]
    assert (attn.kv_heads, attn.head_dim, attn.rope.dim, attn.rope.interleaved, attn.qkv_bias, attn.o_bias) == (
        2,
        128,
        64,
        True,
        True,
        False,
    )
