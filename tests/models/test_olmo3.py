"""OLMo 3 against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
PLAIN = dict(rope_type="default", rope_theta=1e3)
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo3": ("Olmo3", dict(sliding_window=12)),
    "olmo3-tied-mha": ("Olmo3", dict(sliding_window=16, tie_word_embeddings=True, num_key_value_heads=4, num_hidden_layers=5)),
    "olmo3-types-bias": ("Olmo3", dict(sliding_window=5, layer_types=TYPES, attention_bias=True, rms_norm_eps=1e-2)),
    "olmo3-yarn": ("Olmo3", dict(sliding_window=12, rope_parameters=dict(full_attention=YARN, sliding_attention=PLAIN))),
    "olmo3-mqa-head-dim": ("Olmo3", dict(sliding_window=12, hidden_size=96, head_dim=24, num_key_value_heads=1)),
}
CONFIG: dict[str, Any] = dict(architectures=["Olmo3ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=5,
                              num_attention_heads=4, vocab_size=50, max_position_embeddings=65536)  # fmt: skip


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
    attns = [a for _, a in spec_from_config(CONFIG).attns()]
    assert [a.window for a in attns] == [4096, 4096, 4096, None, 4096]
    assert {(a.kv_heads, a.rope and a.rope.theta) for a in attns} == {(4, 5e5)}


def test_a_scaled_rope_is_that_of_the_full_layers_alone() -> None:
    """As published files have it, in the old place."""
    old = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}}
    attns = [a for _, a in spec_from_config(CONFIG | old).attns()]
    assert [bool(a.rope and a.rope.scaling) for a in attns] == [False, False, False, True, False]
