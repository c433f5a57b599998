"""Cohere 2 against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2", dict(sliding_window=12, num_hidden_layers=5)),
    "cohere2-untied": ("Cohere2", dict(sliding_window=16, tie_word_embeddings=False, logit_scale=0.8, num_key_value_heads=4)),
    "cohere2-bias-types": ("Cohere2", dict(sliding_window=5, layer_types=TYPES, attention_bias=True, layer_norm_eps=1e-2)),
    "cohere2-mqa": ("Cohere2", dict(sliding_window=12, hidden_size=96, head_dim=24, num_key_value_heads=1)),
}
CONFIG: dict[str, Any] = dict(architectures=["Cohere2ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=5,
                              num_attention_heads=4, num_key_value_heads=4, vocab_size=50)  # fmt: skip


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


def test_what_a_file_leaves_out() -> None:
    spec = spec_from_config(CONFIG)
    attns = [a for _, a in spec.attns()]
    assert [a.window for a in attns] == [4096, 4096, 4096, None, 4096]
    assert [a.rope and (a.rope.theta, a.rope.interleaved) for a in attns] == [(1e4, True)] * 3 + [None, (1e4, True)]
    assert (spec.head, spec.logit_scale, spec.max_positions) == (None, 0.0625, 8192)
    assert [a.window for _, a in spec_from_config(CONFIG | {"sliding_window_pattern": 2}).attns()] == [4096, None, 4096, None, 4096]
