"""GPT-2 against transformers, with names as either kind of checkpoint has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pyllm.layers import bind
from pyllm.models import spec_from_config
from tests.models import oracle
from tests.models.paged import Paged

pytest.importorskip("transformers")

MHA = {"num_key_value_heads": 4, "n_inner": 96}  # the base sizes have 2 KV heads; GPT-2 knows no such field
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", MHA),
    "gpt2-untied": ("GPT2", MHA | dict(tie_word_embeddings=False, activation_function="gelu")),
    "gpt2-inner": ("GPT2", MHA | dict(n_inner=None, intermediate_size=256, layer_norm_epsilon=1e-2)),
    "gpt2-layer-scale": ("GPT2", MHA | dict(scale_attn_by_inverse_layer_idx=True)),
    "gpt2-no-scale": ("GPT2", MHA | dict(scale_attn_weights=False)),
    "gpt2-head-dim": (
        "GPT2",
        dict(hidden_size=72, num_attention_heads=3, num_key_value_heads=3, head_dim=24, n_inner=40, intermediate_size=40),
    ),
}


def make(name: str) -> oracle.Made:
    """The class is GPT2LMHeadModel, which `oracle.make` does not spell."""
    import transformers

    kind, changes = CASES[name]
    transformers.GPT2ForCausalLM = transformers.GPT2LMHeadModel
    model, config, state = oracle.make(name, kind, changes)
    return model, config | {"architectures": ["GPT2LMHeadModel"]}, state


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", oracle.LENGTHS)
def test_prefill(name: str, length: int) -> None:
    oracle.check_prefill(make(name), length)


@pytest.mark.parametrize("name", CASES)
def test_ragged_chunked_prefill_and_decode(name: str) -> None:
    oracle.check_ragged_chunks_and_decode(make(name))


def test_names_of_the_bare_model_and_stored_masks() -> None:
    """The files of the first release have no "transformer." and hold the causal mask."""
    model, config, state = make("gpt2")
    short = {k.removeprefix("transformer."): v for k, v in state.items()}
    short |= {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256) for i in range(4)}
    spec, ids = spec_from_config(config), torch.arange(20)
    oracle.assert_logits(bind(spec, short)(Paged(spec, 1, 20).step([ids])), oracle.expected(model, ids))
    del short["h.2.ln_1.bias"]
    with pytest.raises(ValueError, match=r"checkpoint has no tensor 'transformer\.h\.2\.ln_1\.bias'"):
        bind(spec, short)


def test_cross_attention_is_refused() -> None:
    _, config, _ = make("gpt2")
    with pytest.raises(ValueError, match="config: add_cross_attention is set, expected a decoder without an encoder"):
        spec_from_config(config | {"add_cross_attention": True})
