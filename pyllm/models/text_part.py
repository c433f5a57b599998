"""The text decoder of checkpoints that have other parts beside it (images), which are left unread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pyllm.layers import Decoder
from pyllm.models.fields import flag

AT = "language_model"
OTHERS = ("vision_model.*", "vision_tower.*", "multi_modal_projector.*")
TEXT_PARTS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
}
"""architecture -> model_type in its text_config -> architecture of the text part."""


def text_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The text part's config as a file of its own would be; what stands outside of it rules (as in transformers)."""
    kinds, inner = TEXT_PARTS[name], config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(f"config: text_config is {inner!r}, expected an object")
    kind = inner.get("model_type") or next(iter(kinds))
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"config: text_config: model_type is {kind!r}, expected {' or '.join(map(repr, kinds))}")
    outer = {n: config[n] for n in ("tie_word_embeddings", "quantization_config") if config.get(n) is not None}
    flag(outer, "tie_word_embeddings")
    return {**inner, **outer, "architectures": [kinds[kind]]}


def as_part(spec: Decoder) -> Decoder:
    """The declaration with the names that it has beside the other parts."""
    own = tuple(g if g.startswith("*") else f"{AT}.{g}" for g in spec.ignore)
    return replace(spec, at=AT, ignore=own + OTHERS)
