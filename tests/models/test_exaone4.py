"""EXAONE 4 against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "exaone4": ("Exaone4", dict(sliding_window=12, num_hidden_layers=5)),
    "exaone4-pattern-tied": ("Exaone4", dict(sliding_window=16, sliding_window_pattern=2, tie_word_embeddings=True)),
    "exaone4-types": ("Exaone4", dict(sliding_window=5, layer_types=TYPES, num_key_value_heads=4, rms_norm_eps=1e-2)),
    "exaone4-full": ("Exaone4", dict(sliding_window=None, layer_types=["full_attention"] * 4, num_key_value_heads=1, head_dim=24)),
}
CONFIG: dict[str, Any] = dict(architectures=["Exaone4ForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=6,
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


def windows(**changes: Any) -> list[int | None]:
    return [a.window for _, a in spec_from_config(CONFIG | changes).attns()]


def test_patterns() -> None:
    """A number, and a text whose last layer is a full one whatever it says; without a window all layers are rotated."""
    assert windows() == windows(sliding_window_pattern=4) == [4096] * 3 + [None] + [4096] * 2
    assert windows(sliding_window_pattern="LLG", sliding_window=7) == [7, 7, None, 7, 7, None]
    assert windows(sliding_window_pattern="LLLG") == [4096] * 3 + [None, 4096, None]
    assert windows(sliding_window=None, sliding_window_pattern=None) == [None] * 6
    rotated = [a.rope is not None for _, a in spec_from_config(CONFIG | dict(sliding_window=None)).attns()]
    assert rotated == [True] * 6


@pytest.mark.parametrize("value", ["", "LX", 0, True, None, 1.5])
def test_a_bad_pattern_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match="^config: sliding_window_pattern is .*, expected a positive integer or a text of L and G"):
        spec_from_config(CONFIG | {"sliding_window_pattern": value})
