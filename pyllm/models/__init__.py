"""Models: functions from a normalised config to a declaration. `REGISTRY` maps Hugging Face architecture names to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from pyllm.layers import Decoder
from pyllm.models.gemma2 import gemma2
from pyllm.models.hf import normalize
from pyllm.models.llama import llama

REGISTRY: dict[str, Callable[[SimpleNamespace], Decoder]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": llama,
    "Gemma2ForCausalLM": gemma2,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"mlp_bias": False},
    "MistralForCausalLM": {"sliding_window": 4096, "layer_types": None, "max_position_embeddings": 131072},
    "Gemma2ForCausalLM": {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "layer_types": None,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
"""What a field that config.json leaves out means: published Gemma 2 files do not say that their head is tied."""


def spec_from_config(config: Mapping[str, Any]) -> Decoder:
    """The declaration for a Hugging Face config.json. Errors (ValueError): an architecture or a field that is not served, by name."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config is {type(config).__name__}, expected an object")
    names = config.get("architectures")
    found = next((n for n in names if isinstance(n, str) and n in REGISTRY), None) if isinstance(names, list) else None
    if found is None:
        raise ValueError(f"config: architectures is {names!r}, expected a list with one of {', '.join(REGISTRY)}")
    return REGISTRY[found](normalize(config, DEFAULTS.get(found)))


__all__ = ["DEFAULTS", "REGISTRY", "gemma2", "llama", "normalize", "spec_from_config"]
