"""One row of `ARCHS` per GGUF architecture: the names in a layer, how tensors are stored, and the config fields it has of its own.

A file leaves out what llama.cpp knows by itself, so that some numbers are rules here: the scale of Gemma's scores (told apart by the
number of layers), the base of Gemma 3's windowed layers, which layers have the window, and that Qwen 3's expert weights sum to 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .gguf_file import GgufFile
from .gguf_keys import MAX_CONTEXT, MAX_EXPERTS, MAX_WIDTH, Keys

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA_LAYER = ATTENTION | {"ffn_norm": "post_attention_layernorm"} | MLP
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
QWEN_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {s: f"mlp.experts.{{}}.{s[4:-5]}_proj" for s in STACKS}
MIXTRAL_EXPERTS = {"ffn_gate_inp": "block_sparse_moe.gate"}
MIXTRAL_EXPERTS |= {s: f"block_sparse_moe.experts.{{}}.{w}" for s, w in zip(STACKS, ("w1", "w3", "w2"), strict=True)}
GPT_OSS_EXPERTS = {"ffn_gate_inp": "mlp.router", STACKS[0]: "mlp.experts.gate_up_proj", STACKS[1]: "mlp.experts.gate_up_proj"}
GPT_OSS_EXPERTS |= {STACKS[2]: "mlp.experts.down_proj"}
PHI3_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA2_27B, GEMMA3_27B = 46, 62  # layers of the two sizes whose scores are scaled by hidden size / heads in place of the head's size


def has_bias(file: GgufFile, stem: str) -> bool:
    """Some layer has a bias of this name."""
    return any(re.fullmatch(rf"blk\.\d+\.{stem}\.bias", tensor) for tensor in file)


def _llama(keys: Keys, base: Mapping[str, Any]) -> dict[str, Any]:
    return {"mlp_bias": has_bias(keys.file, "ffn_up")}


def _no_fields(keys: Keys, base: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Arch:
    """How one GGUF architecture reads: the Hugging Face class, the names in a layer, which rows are permuted, its own fields."""

    hf_class: str
    model_type: str
    layer: Mapping[str, str]
    fields: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = _no_fields
    q_rows: tuple[str, ...] = ()
    k_rows: tuple[str, ...] = ()
    norms_plus_one: bool = False  # the file has w + 1 where Hugging Face has w
    experts: str = ""  # "each": a tensor of its own for every expert ({} in its name); "stacked": gpt-oss's three-dimensional ones
    partial_rotary: bool = False
    act: str = "silu"
    scaling: tuple[str, ...] = ("linear", "yarn")


def _types(windowed: list[bool]) -> list[str]:
    return ["sliding_attention" if w else "full_attention" for w in windowed]


def _experts(keys: Keys) -> dict[str, Any]:
    count = keys.size("expert_count", MAX_EXPERTS)
    return {"num_experts": count, "num_experts_per_tok": keys.size("expert_used_count", count)}


def _qwen3_moe(keys: Keys, base: Mapping[str, Any]) -> dict[str, Any]:
    return _experts(keys) | {
        "moe_intermediate_size": keys.size("expert_feed_forward_length", MAX_WIDTH),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mixtral(keys: Keys, base: Mapping[str, Any]) -> dict[str, Any]:
    return _experts(keys)


def _score_scale(base: Mapping[str, Any], odd_size: int) -> int:
    layers, heads = base["num_hidden_layers"], base["num_attention_heads"]
    return int(base["hidden_size"] // heads if layers == odd_size else base["head_dim"])


def _gemma2(keys: Keys, base: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": keys.size("attention.sliding_window", MAX_CONTEXT, default=4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _score_scale(base, GEMMA2_27B),
    }


def _gemma3(keys: Keys, base: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.size("attention.sliding_window", MAX_CONTEXT, default=0, least=0)
    pattern = keys.size("attention.sliding_window_pattern", base["num_hidden_layers"], default=6) if window else 1
    cap = keys.number("final_logit_softcapping", 0.0)
    return {
        "sliding_window": window or None,
        "layer_types": _types([(i + 1) % pattern > 0 for i in range(base["num_hidden_layers"])]),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _score_scale(base, GEMMA3_27B),
        "final_logit_softcapping": cap or None,
    }


def _phi3(keys: Keys, base: Mapping[str, Any]) -> dict[str, Any]:
    longest = base["max_position_embeddings"]
    return {
        "sliding_window": keys.size("attention.sliding_window", MAX_CONTEXT, default=0, least=0) or None,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length", MAX_CONTEXT, default=longest),
    }


def _gpt_oss(keys: Keys, base: Mapping[str, Any]) -> dict[str, Any]:
    """Every other layer has the window, the first one does. The correction range of the yarn rule is not rounded (truncate)."""
    scaling = base["rope_scaling"]
    return _experts(keys) | {
        "intermediate_size": keys.size("expert_feed_forward_length", MAX_WIDTH),
        "sliding_window": keys.size("attention.sliding_window", MAX_CONTEXT, default=128),
        "layer_types": _types([i % 2 == 0 for i in range(base["num_hidden_layers"])]),
        "rope_scaling": scaling and scaling | {"truncate": False},
    }


ARCHS: dict[str, Arch] = {
    "llama": Arch(
        "LlamaForCausalLM", "llama", LLAMA_LAYER, _llama, q_rows=("attn_q",), k_rows=("attn_k",), scaling=("linear", "yarn", "llama3")
    ),
    "qwen2": Arch("Qwen2ForCausalLM", "qwen2", LLAMA_LAYER),
    "qwen3": Arch("Qwen3ForCausalLM", "qwen3", LLAMA_LAYER | QK_NORM),
    "qwen3moe": Arch(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        ATTENTION | QK_NORM | {"ffn_norm": "post_attention_layernorm"} | QWEN_EXPERTS,
        _qwen3_moe,
        experts="each",
    ),
    "gemma2": Arch("Gemma2ForCausalLM", "gemma2", ATTENTION | SANDWICH | MLP, _gemma2, norms_plus_one=True, act="gelu_pytorch_tanh"),
    "gemma3": Arch(
        "Gemma3ForCausalLM", "gemma3_text", ATTENTION | QK_NORM | SANDWICH | MLP, _gemma3, norms_plus_one=True, act="gelu_pytorch_tanh"
    ),
    "phi3": Arch("Phi3ForCausalLM", "phi3", PHI3_LAYER, _phi3, partial_rotary=True, scaling=("longrope",)),
    "gpt-oss": Arch(
        "GptOssForCausalLM",
        "gpt_oss",
        ATTENTION | {"attn_sinks": "self_attn.sinks", "post_attention_norm": "post_attention_layernorm"} | GPT_OSS_EXPERTS,
        _gpt_oss,
        experts="stacked",
        scaling=("yarn",),
    ),
}

# Llama with experts is Mixtral.
WITH_EXPERTS: dict[str, Arch] = {
    "llama": Arch(
        "MixtralForCausalLM",
        "mixtral",
        ATTENTION | {"ffn_norm": "post_attention_layernorm"} | MIXTRAL_EXPERTS,
        _mixtral,
        q_rows=("attn_q",),
        k_rows=("attn_k",),
        experts="each",
        scaling=("linear", "yarn", "llama3"),
    )
}
