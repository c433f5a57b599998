"""Gemma 1 against transformers, and its config fields."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {}),
    "gemma-mqa-head-dim": ("Gemma", dict(num_key_value_heads=1, head_dim=24)),
    "gemma-untied-biases": ("Gemma", dict(tie_word_embeddings=False, attention_bias=True)),
    "gemma-silu": ("Gemma", dict(hidden_act="silu")),
}
FILE: dict[str, Any] = dict(
    architectures=["GemmaForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


def test_what_gemma_files_leave_out_or_say_otherwise() -> None:
    """The first files say "gelu", later ones also name the approximation in a field of its own; all mean the same."""
    spec = spec_from_config(FILE)
    assert (spec.head, spec.embed_scale, spec.subs[1].body.act, spec.attns()[0][1].head_dim) == (None, 8.0, "gelu_tanh", 256)
    for said in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, {"tie_word_embeddings": True}):
        assert spec == spec_from_config(FILE | said)


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="^config: use_bidirectional_attention is set, expected a causal decoder"):
        spec_from_config(FILE | {"use_bidirectional_attention": True})
