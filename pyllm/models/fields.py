"""Fields of config.json: which are read and which cannot change the result, and readers that refuse by name what they cannot serve."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}
READ = {
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "attention_bias",
    "original_max_position_embeddings",
}  # fmt: skip
NUMBERS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "layer_norm_eps", "rope_local_base_freq",
            "attn_scale", "floor_scale", "clip_qkv")  # fmt: skip
NULLABLE = ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv")
LEAST, MOST = 1e-30, 1e30  # of any number: fp32 holds its square root's inverse, and products of a few
FACTORS = ("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "swiglu_alpha",
           "swiglu_limit", "routed_scaling_factor")  # fmt: skip
SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "shared_expert_intermediate_size",
         "no_rope_layer_interval", "intermediate_size_mlp", "interleave_moe_layer_step", "kv_lora_rank", "qk_nope_head_dim",
         "qk_rope_head_dim", "v_head_dim", "moe_layer_freq")  # fmt: skip
COUNTS = ("rotary_dim", "q_lora_rank", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group")
CHOICES = {"topk_method": ("greedy", "group_limited_greedy", "noaux_tc"), "scoring_func": ("softmax", "sigmoid")}
SWITCHES = ("use_bias", "use_qkv_bias", "use_parallel_residual", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
             "multi_query", "parallel_attn", "new_decoder_architecture", "attn_temperature_tuning", "rope_interleave",
            "attention_out_bias")  # fmt: skip
COUNTED_SWITCHES = ("attn_temperature_tuning",)  # the first Llama 4 files say 4
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "qkv_bias", "use_qk_norm", "alibi",
          *SWITCHES)  # fmt: skip
OWN = {
    *NUMBERS, *FACTORS, *SWITCHES, *SIZES, *COUNTS, *CHOICES, "sliding_window_pattern", "num_ln_in_parallel_attn", "use_sliding_window",
    "max_window_layers", "norm_topk_prob", "mlp_only_layers", "qkv_bias", "no_rope_layers", "mlp_bias", "sliding_window", "layer_types",
    "moe_layers", "llama_4_scaling_beta", "attn_type_list", "attention_chunk_size",
}  # fmt: skip
"""Read for the architectures that have them in their defaults; for others, as in transformers, they change nothing (and warn)."""
WIDTHS = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
LIMITS = {"num_hidden_layers": 4096, "num_experts": 4096, "max_position_embeddings": 1 << 24, "vocab_size": 1 << 22}
LIMITS |= dict.fromkeys(WIDTHS, 1 << 20)
"""More than any model has, and the positions that fp32 angles tell apart: a damaged config is an error, not a hang."""
MOST_SIZE = 1 << 30  # of any other size or count: kernels take 32-bit integers
SHOWN = 20  # names in a warning
INERT = {
    "attention_dropout", "hidden_dropout", "residual_dropout", "initializer_range", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "torch_dtype", "dtype", "transformers_version", "model_type", "pretraining_tp", "_name_or_path",
    "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
    "cache_implementation", "_attn_implementation", "_attn_implementation_autoset", "auto_map", "is_llama_config",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "quantization_config", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "resid_pdrop", "embd_pdrop", "attn_pdrop", "embedding_dropout", "classifier_dropout", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "reorder_and_upcast_attn", "n_ctx",
    "task_specific_params", "is_decoder", "_sliding_window_pattern", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers", "ep_size",
    "aux_loss_alpha", "seq_aux", "for_llm_compressor", "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp",
    "shared_moe_mode",
}  # fmt: skip
REFUSED = {
    "use_bidirectional_attention": "a causal decoder",
    "is_encoder_decoder": "a causal decoder",
    "add_cross_attention": "a decoder without an encoder",
    "qk_layernorm": "q and k without a LayerNorm for each head",
    "use_qk_norm": "q and k without a LayerNorm for each head",
    "alibi": "rotary positions",
    "apply_residual_connection_post_layernorm": "a residual that is taken before the norm",
    "rope_interleaved": "a checkpoint whose rotary pairs are the halves of a head",
}
"""Flags that must be off or absent, but for the architectures that have them in their defaults, and what is expected."""
OFF: dict[str, Any] = {
    "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
    "use_routing_bias": True,
}  # fmt: skip
"""Fields that some files have at the value at which they change nothing; at another one they are said like any that is not read."""

NAMES: dict[str, dict[str, str]] = {
    "GPT2LMHeadModel": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
    },
    "DeepseekV2ForCausalLM": {"n_routed_experts": "num_experts"},
    "DeepseekV3ForCausalLM": {"n_routed_experts": "num_experts"},
    "Dots1ForCausalLM": {"n_routed_experts": "num_experts"},
    "Glm4MoeForCausalLM": {"n_routed_experts": "num_experts"},
    "Gemma2ForCausalLM": {"sliding_window_size": "sliding_window"},
    "GPTNeoXForCausalLM": {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
    "GptOssForCausalLM": {"experts_per_token": "num_experts_per_tok", "initial_context_length": "original_max_position_embeddings"},
    "FalconForCausalLM": {
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "activation": "hidden_act",
        "layer_norm_epsilon": "layer_norm_eps",
        "bias": "use_bias",
    },
    "NemotronForCausalLM": {"norm_eps": "layer_norm_eps"},
    "Starcoder2ForCausalLM": {"norm_epsilon": "layer_norm_eps"},
}
"""What an architecture's config.json calls a field that has a canonical name."""


def warn_unread(names: Iterable[str], where: str = "config") -> None:
    unknown = sorted(map(str, names))
    if unknown:
        more = f" (and {len(unknown) - SHOWN} more)" if len(unknown) > SHOWN else ""
        warnings.warn(f"{where}: fields that are not read: {', '.join(n[:80] for n in unknown[:SHOWN])}{more}", stacklevel=4)


def one_name(config: Mapping[str, Any], alias: str, name: str) -> dict[str, Any]:
    """`config` with the field `alias` called `name`; both are an error unless they say the same."""
    out, value, other = {k: v for k, v in config.items() if k != alias}, config.get(alias), config.get(name)
    if value is not None and other not in (None, value):
        raise ValueError(f"config: {alias} is {value!r}, but {name} is {other!r}")
    return out if value is None else out | {name: value}


def integers(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """A list of integers >= 0 as a tuple; `default` where it is absent."""
    value = config.get(name)
    if value is not None and not (isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)):
        raise ValueError(f"config: {name} is {value!r}, expected a list of integers")
    return default if value is None else tuple(value)


def size(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value, most = config.get(name, default), LIMITS.get(name, MOST_SIZE)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config: {name} is {value!r}, expected a {'positive integer' if least else 'count'}")
    if value > most:
        raise ValueError(f"config: {name} is {value}, expected at most {most}")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None, where: str = "config") -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not LEAST <= value <= MOST:
        raise ValueError(f"{where}: {name} is {value!r}, expected a positive number, from {LEAST:g} to {MOST:g}")
    return float(value)


def numbers(config: Mapping[str, Any], read: set[str]) -> dict[str, float | None]:
    """What one architecture or another has: of one that has it null is an error, as in transformers, but for those that may be none."""
    needed = read & (set(FACTORS) | set(NUMBERS) - set(NULLABLE))
    names = (*NUMBERS, *FACTORS)
    return {n: None if n not in needed and config.get(n) is None else number(config, n) for n in names}


def flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    value = bool(value) if name in COUNTED_SWITCHES and type(value) is int else value
    if value not in (None, True, False) or (value is not None and not isinstance(value, bool)):
        raise ValueError(f"config: {name} is {value!r}, expected true or false")
    return bool(value)


def choices(config: Mapping[str, Any], read: set[str]) -> dict[str, str | None]:
    """Fields with one of a few words."""
    out: dict[str, str | None] = {}
    for name, words in CHOICES.items():
        value = config.get(name) if name in read else None
        if value is not None and (not isinstance(value, str) or value not in words):
            raise ValueError(f"config: {name} is {value!r}, expected one of {', '.join(words)}")
        out[name] = value
    return out
