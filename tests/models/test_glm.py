"""GLM (first generation) against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("Glm", {}),
    "glm-tied-no-bias": ("Glm", dict(tie_word_embeddings=True, attention_bias=False, num_key_value_heads=4)),
    "glm-mqa-head-dim": ("Glm", dict(num_key_value_heads=1, head_dim=24, rms_norm_eps=1e-2)),
    "glm-whole-rotation": ("Glm", dict(partial_rotary_factor=1.0)),
}
CONFIG: dict[str, Any] = dict(architectures=["GlmForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                              num_attention_heads=4, vocab_size=50)  # fmt: skip


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
    attn = spec_from_config(CONFIG).attns()[0][1]
    assert attn.rope is not None
    assert (attn.kv_heads, attn.head_dim, attn.qkv_bias, attn.o_bias, attn.rope.dim, attn.rope.interleaved) == (
        2,
        128,
        True,
        False,
        64,
        True,
    )
