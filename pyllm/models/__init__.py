"""Models: functions from a normalised config to a declaration. `REGISTRY` maps Hugging Face architecture names to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from pyllm.layers import Decoder
from pyllm.models.arcee import arcee
from pyllm.models.cohere import cohere
from pyllm.models.cohere2 import cohere2
from pyllm.models.deepseek import deepseek_v2, deepseek_v3
from pyllm.models.defaults import DEFAULTS
from pyllm.models.dots1 import dots1
from pyllm.models.ernie4_5 import ernie4_5
from pyllm.models.exaone4 import exaone4
from pyllm.models.falcon import falcon
from pyllm.models.fields import NAMES
from pyllm.models.gemma import gemma
from pyllm.models.gemma2 import gemma2
from pyllm.models.gemma3 import gemma3
from pyllm.models.glm import glm
from pyllm.models.glm4 import glm4
from pyllm.models.glm4_moe import glm4_moe
from pyllm.models.gpt2 import gpt2
from pyllm.models.gpt_neox import gpt_neox
from pyllm.models.gpt_oss import gpt_oss
from pyllm.models.granite import granite
from pyllm.models.hf import normalize
from pyllm.models.llama import llama
from pyllm.models.llama4 import llama4
from pyllm.models.minimax_m2 import minimax_m2
from pyllm.models.ministral3 import ministral3
from pyllm.models.mixtral import mixtral
from pyllm.models.nemotron import nemotron
from pyllm.models.olmo2 import olmo2
from pyllm.models.olmo3 import olmo3
from pyllm.models.olmoe import olmoe
from pyllm.models.phi import phi
from pyllm.models.phi3 import phi3
from pyllm.models.qwen2 import qwen2
from pyllm.models.qwen3 import qwen3
from pyllm.models.qwen_moe import qwen2_moe, qwen3_moe
from pyllm.models.seed_oss import seed_oss
from pyllm.models.smollm3 import smollm3
from pyllm.models.stablelm import stablelm
from pyllm.models.starcoder2 import starcoder2
from pyllm.models.text_part import TEXT_PARTS, as_part, text_config

REGISTRY: dict[str, Callable[[SimpleNamespace], Decoder]] = {
    "LlamaForCausalLM": llama,
    "Llama4ForCausalLM": llama4,
    "MistralForCausalLM": llama,
    "MinistralForCausalLM": llama,
    "Ministral3ForCausalLM": ministral3,
    "MixtralForCausalLM": mixtral,
    "GemmaForCausalLM": gemma,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "CohereForCausalLM": cohere,
    "Cohere2ForCausalLM": cohere2,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Exaone4ForCausalLM": exaone4,
    "FalconForCausalLM": falcon,
    "GlmForCausalLM": glm,
    "Glm4ForCausalLM": glm4,
    "GraniteForCausalLM": granite,
    "NemotronForCausalLM": nemotron,
    "GPT2LMHeadModel": gpt2,
    "GPTNeoXForCausalLM": gpt_neox,
    "GptOssForCausalLM": gpt_oss,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Phi3ForCausalLM": phi3,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "ArceeForCausalLM": arcee,
    "Glm4MoeForCausalLM": glm4_moe,
    "OlmoeForCausalLM": olmoe,
    "PhiForCausalLM": phi,
    "SeedOssForCausalLM": seed_oss,
    "Dots1ForCausalLM": dots1,
    "Ernie4_5ForCausalLM": ernie4_5,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "SmolLM3ForCausalLM": smollm3,
}


def spec_from_config(config: Mapping[str, Any]) -> Decoder:
    """The declaration for a Hugging Face config.json. Errors (ValueError): an architecture or a field that is not served, by name."""
    if not isinstance(config, Mapping):
        raise ValueError(f"config is {type(config).__name__}, expected an object")
    names = config.get("architectures")
    known = {**REGISTRY, **TEXT_PARTS}
    found = next((n for n in names if isinstance(n, str) and n in known), None) if isinstance(names, list) else None
    if found is None:
        raise ValueError(f"config: architectures is {names!r}, expected a list with one of {', '.join(known)}")
    if found in TEXT_PARTS:
        return as_part(spec_from_config(text_config(found, config)))
    return REGISTRY[found](normalize(config, DEFAULTS.get(found), NAMES.get(found)))


__all__ = [
    "DEFAULTS",
    "NAMES",
    "REGISTRY",
    "TEXT_PARTS",
    "arcee",
    "cohere",
    "cohere2",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "llama",
    "llama4",
    "minimax_m2",
    "ministral3",
    "mixtral",
    "nemotron",
    "normalize",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "spec_from_config",
    "stablelm",
    "starcoder2",
]
