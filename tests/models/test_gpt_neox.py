"""GPT-NeoX against transformers, and its published config fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyllm.layers import bind
from pyllm.models import spec_from_config
from tests.models import oracle

pytest.importorskip("transformers")

MHA = {"num_key_value_heads": 4}  # the base sizes have 2; GPT-NeoX knows no such field
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-neox": ("GPTNeoX", MHA),
    "gpt-neox-sequential": ("GPTNeoX", MHA | dict(use_parallel_residual=False)),
    "gpt-neox-tied": ("GPTNeoX", MHA | dict(tie_word_embeddings=True, layer_norm_eps=1e-2)),
    "gpt-neox-no-bias": ("GPTNeoX", MHA | dict(attention_bias=False, hidden_act="gelu_new")),
    "gpt-neox-head-dim": ("GPTNeoX", dict(hidden_size=72, num_attention_heads=3, num_key_value_heads=3, head_dim=24,
                                          rope_parameters=dict(rope_type="default", rope_theta=1e3, partial_rotary_factor=0.5))),
}  # fmt: skip


def make(name: str) -> oracle.Made:
    """Published files call the head embed_out, which newer transformers rename as they read them."""
    model, config, state = oracle.make(name, *CASES[name])
    return model, config, {k.replace("lm_head", "embed_out"): v for k, v in state.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


CONFIG: dict[str, Any] = dict(architectures=["GPTNeoXForCausalLM"], hidden_size=64, intermediate_size=96, num_hidden_layers=1,
                              num_attention_heads=4, vocab_size=50)  # fmt: skip


def test_rotary_fields_as_files_have_them() -> None:
    assert spec_from_config(CONFIG) == spec_from_config(CONFIG | {"rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_act": "gelu"})
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    assert spec_from_config(CONFIG | {"rotary_pct": 0.5, "rotary_emb_base": 500.0}) == spec_from_config(CONFIG | new)


def test_stored_masks_are_left_unread() -> None:
    _, config, state = make("gpt-neox")
    masks = {f"gpt_neox.layers.{i}.attention.{n}": torch.zeros(1) for i in range(4) for n in ("bias", "masked_bias", "rotary_emb.inv_freq")}
    bind(spec_from_config(config), state | masks)
