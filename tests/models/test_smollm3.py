"""SmolLM3 against transformers, and its config fields."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", {}),
    "smollm3-own-list": ("SmolLM3", dict(no_rope_layers=[0, 1, 1, 0], tie_word_embeddings=False)),
    "smollm3-interval": ("SmolLM3", dict(no_rope_layer_interval=2, attention_bias=True, mlp_bias=True)),
    "smollm3-window": ("SmolLM3", dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=12)),
    "smollm3-yarn": ("SmolLM3", dict(rope_parameters=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64))),
}
FILE: dict[str, Any] = dict(
    architectures=["SmolLM3ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4, vocab_size=50
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


def rotated(**changes: Any) -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [a.rope is not None for _, a in spec_from_config(FILE | changes).attns()]


def test_layers_without_rotation() -> None:
    """A list longer than the model is served as transformers does; max_window_layers means nothing without use_sliding_window."""
    assert rotated() == rotated(no_rope_layers=[1, 1, 1, 0, 1, 0, 0], max_window_layers=28, use_sliding_window=False)
    assert rotated() == [True, True, True, False, True]
    assert rotated(no_rope_layer_interval=2) == [True, False, True, False, True]
    attn, head = spec_from_config(FILE).attns()[0][1], spec_from_config(FILE).head
    assert (attn.rope and attn.rope.theta, attn.kv_heads, head) == (2e6, 4, None)


def test_window_of_the_layers_without_rotation() -> None:
    on = FILE | {"use_sliding_window": True, "sliding_window": 7}
    assert [a.window for _, a in spec_from_config(on).attns()] == [None, None, None, 7, None]
    assert [a.window for _, a in spec_from_config(on | {"use_sliding_window": False}).attns()] == [None] * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"no_rope_layers": [1, 1]}, "no_rope_layers has 2 entries, expected num_hidden_layers=5 or more"),
     ({"no_rope_layers": "1"}, "no_rope_layers is '1', expected a list of integers"),
     ({"no_rope_layers": [True] * 5}, "no_rope_layers is"),
     ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, expected a positive integer")],
)  # fmt: skip
def test_bad_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: {message}"):
        spec_from_config(FILE | changes)
