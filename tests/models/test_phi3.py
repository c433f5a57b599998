"""Phi-3 against transformers: fused q/k/v and gate/up, LongRoPE over part of a head, and its published config fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyllm.layers import LongRope, bind
from pyllm.models import spec_from_config
from tests.models import oracle
from tests.models.paged import Paged

pytest.importorskip("transformers")

LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0 + i / 9 for i in range(8)], long_factor=[2.0 + i for i in range(8)])
PART = dict(short_factor=[1.0 + i / 9 for i in range(6)], long_factor=[2.0 + i for i in range(6)], partial_rotary_factor=0.75)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", dict(original_max_position_embeddings=256)),
    "phi3-tied-mha": ("Phi3", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "phi3-window": ("Phi3", dict(sliding_window=12)),
    "phi3-partial": ("Phi3", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.75))),
    "phi3-head-dim": ("Phi3", dict(hidden_size=96, head_dim=24, num_key_value_heads=1)),
    "phi3-longrope": ("Phi3", dict(original_max_position_embeddings=64, rope_parameters=LONG)),
    "phi3-longrope-partial": ("Phi3", dict(original_max_position_embeddings=64, rope_parameters=LONG | PART)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(oracle.make(name, *CASES[name]), length)


@pytest.mark.parametrize("name", [n for n in CASES if "longrope" not in n])
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    """LongRoPE is left out: transformers too gives other logits when keys were rotated at a shorter length."""
    oracle.check_ragged_chunks_and_decode(oracle.make(name, *CASES[name]))


@pytest.mark.parametrize("name", ["phi3-longrope", "phi3-longrope-partial"])
def test_longrope_in_chunks_of_a_known_text(name: str) -> None:
    model, config, state = oracle.make(name, *CASES[name])
    spec = spec_from_config(config)
    bound, ids, pages = bind(spec, state), torch.arange(70) % oracle.SIZES["vocab_size"], Paged(spec, 1, 70)
    rows = [bound(pages.step([ids[a:b]], known=[70])) for a, b in ((0, 20), (20, 21), (21, 70))]
    oracle.assert_logits(torch.cat(rows), oracle.expected(model, ids))


def test_long_context_fields_as_files_have_them() -> None:
    config = {"architectures": ["Phi3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 50}
    config |= {"num_attention_heads": 4, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    specs = [spec_from_config(config | {"rope_scaling": {"type": kind} | factors}) for kind in ("longrope", "su")]
    assert specs[0] == specs[1]
    assert specs[0].attns()[0][1].rope.scaling == LongRope((1.0,) * 8, (2.0,) * 8, 4096, 32.0)
