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


def spec_from_config(config: Mapping[str, Any]) -> Decoder:
    """The declaration for a Hugging Face config.json. Errors (ValueError): an architecture or a field that is not served, by name."""
    names = list(config.get("architectures") or [])
    found = next((REGISTRY[n] for n in names if n in REGISTRY), None)
    if found is None:
        raise ValueError(f"config: architectures is {names}, expected one of {', '.join(REGISTRY)}")
    return found(normalize(config))


__all__ = ["REGISTRY", "gemma2", "llama", "normalize", "spec_from_config"]
