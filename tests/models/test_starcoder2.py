"""StarCoder2 against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2", {}),
    "starcoder2-untied": ("Starcoder2", dict(tie_word_embeddings=False, hidden_act="gelu")),
    "starcoder2-no-bias": ("Starcoder2", dict(use_bias=False, num_key_value_heads=4)),
    "starcoder2-window": ("Starcoder2", dict(sliding_window=12, num_key_value_heads=1)),
    "starcoder2-head-dim": ("Starcoder2", dict(head_dim=24, norm_epsilon=1e-2)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


def test_what_a_file_leaves_out() -> None:
    config = {"architectures": ["Starcoder2ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "vocab_size": 50}
    said = {"tie_word_embeddings": True, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 4096}
    assert spec_from_config(config) == spec_from_config(config | said | {"norm_epsilon": 1e-5, "use_bias": True})
