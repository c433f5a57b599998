"""Ministral 3 against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.layers import Yarn
from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

ROPE: dict[str, Any] = dict(rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=20, mscale=1.0,
                            mscale_all_dim=1.0, llama_4_scaling_beta=0.4)  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral3": ("Ministral3", dict(rope_parameters=ROPE)),
    "ministral3-tied": ("Ministral3", dict(rope_parameters=ROPE | dict(llama_4_scaling_beta=0.1), tie_word_embeddings=True)),
    "ministral3-window": ("Ministral3", dict(rope_parameters=ROPE, sliding_window=12, num_key_value_heads=4)),
}
FILE: dict[str, Any] = dict(
    architectures=["Ministral3ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, vocab_size=50
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [*oracle.LENGTHS, 19, 20, 21, 39, 40])  # around the steps of the factor
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


@pytest.mark.parametrize("name", ["ministral3"])
def test_two_ranks_and_separate_ops(name: str) -> None:
    oracle.check_two_ranks_and_separate_ops(oracle.make(name, *CASES[name]))


def test_what_files_leave_out() -> None:
    spec = spec_from_config(FILE)
    attn = spec.attns()[0][1]
    assert attn.rope is not None and attn.variant is not None
    assert (attn.rope.theta, attn.rope.scaling) == (1e6, Yarn(16.0, 16384, mscale=1.0, mscale_all_dim=1.0))
    assert (attn.kv_heads, attn.head_dim, attn.window, spec.max_positions) == (8, 128, None, 262144)
    assert [(p.name, p.value) for p in attn.variant.params] == [("attn_scale", 0.1), ("floor_scale", 16384), ("first", 0.0)]


@pytest.mark.parametrize(
    ("rope", "message"),
    [({"rope_type": "default"}, "rope_parameters is None, expected yarn with a llama_4_scaling_beta"),
     ({k: v for k, v in ROPE.items() if k != "llama_4_scaling_beta"}, "rope_parameters is Yarn.* expected yarn with a llama_4"),
     (ROPE | {"llama_4_scaling_beta": 0}, "rope_parameters: llama_4_scaling_beta is 0, expected a positive number")],
)  # fmt: skip
def test_bad_ropes_are_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        spec_from_config(FILE | {"rope_parameters": rope})


def test_others_say_that_they_do_not_read_it() -> None:
    with pytest.warns(UserWarning, match="rope_parameters: fields that are not read: llama_4_scaling_beta"):
        spec_from_config(FILE | {"architectures": ["LlamaForCausalLM"], "rope_parameters": ROPE})
