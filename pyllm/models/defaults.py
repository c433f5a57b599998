"""What a config.json leaves to its architecture: `DEFAULTS` of fields that a file may omit, `NAMES` of fields called otherwise,
`REFUSED`: flags that must be off."""

from __future__ import annotations

from typing import Any

_QWEN: dict[str, Any] = {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
_QWEN_LATE = _QWEN | {"max_window_layers": 28, "layer_types": None}
_QWEN_MOE: dict[str, Any] = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
_GLM: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"mlp_bias": False},
    "MistralForCausalLM": {"sliding_window": 4096, "layer_types": None, "max_position_embeddings": 131072},
    "MinistralForCausalLM": {
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "layer_types": None,
        "max_position_embeddings": 131072,
    },
    "MixtralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "GemmaForCausalLM": {
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 256,
        "max_position_embeddings": 8192,
    },
    "Qwen2ForCausalLM": _QWEN_LATE,
    "Qwen3ForCausalLM": _QWEN_LATE | {"head_dim": 128},
    "Qwen2MoeForCausalLM": _QWEN_LATE
    | _QWEN_MOE
    | {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    "Qwen3MoeForCausalLM": _QWEN
    | _QWEN_MOE
    | {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "SmolLM3ForCausalLM": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    "Gemma2ForCausalLM": {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "layer_types": None,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
    },
    "GPT2LMHeadModel": {
        "tie_word_embeddings": True,
        "hidden_act": "gelu_new",
        "max_position_embeddings": 1024,
        "ff_ratio": 4,
        "layer_norm_eps": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    "GPTNeoXForCausalLM": {
        "hidden_act": "gelu",
        "attention_bias": True,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": True,
    },
    "GptOssForCausalLM": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "rope_theta": 1.5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "layer_types": None,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "CohereForCausalLM": {
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rope_theta": 5e5,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
    },
    "Cohere2ForCausalLM": {
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    "Exaone4ForCausalLM": {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    "FalconForCausalLM": {
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "ff_ratio": 4,
        "layer_norm_eps": 1e-5,
        "multi_query": True,
        "parallel_attn": True,
        "new_decoder_architecture": False,
        "num_ln_in_parallel_attn": None,
        "use_bias": False,
    },
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "GraniteForCausalLM": {
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    "NemotronForCausalLM": {
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "mlp_bias": False,
    },
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "StableLmForCausalLM": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "use_parallel_residual": False,
    },
    "Starcoder2ForCausalLM": {
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "layer_norm_eps": 1e-5,
        "sliding_window": None,
        "use_bias": True,
    },
}
"""What a field that config.json leaves out means: published Gemma 2 files do not say that their head is tied."""

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
