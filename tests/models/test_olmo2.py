"""OLMo 2 against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models import oracle

pytest.importorskip("transformers")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2", {}),
    "olmo2-tied-mha": ("Olmo2", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "olmo2-bias": ("Olmo2", dict(attention_bias=True, rms_norm_eps=1e-2)),
    "olmo2-mqa-head-dim": ("Olmo2", dict(hidden_size=96, head_dim=24, num_key_value_heads=1)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))
