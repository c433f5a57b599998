"""config.json as well-known checkpoints publish it: read without a warning, and to the shapes that their cards name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pyllm.layers import Decoder, plan
from pyllm.models import spec_from_config
from pyllm.plan.explain import explain

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.46.0", "use_cache": True, "torch_dtype": "bfloat16"}
COMMON = TOKENS | {"attention_dropout": 0.0, "initializer_range": 0.02, "hidden_act": "silu", "tie_word_embeddings": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}


def sizes(d: int, ff: int, layers: int, heads: int, kv: int, vocab: int, longest: int) -> dict[str, Any]:
    return {
        "hidden_size": d, "intermediate_size": ff, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "vocab_size": vocab, "max_position_embeddings": longest,
    }  # fmt: skip


FILES: dict[str, tuple[float, dict[str, Any]]] = {
    "Llama-3.1-8B": (8.03, COMMON | sizes(4096, 14336, 32, 32, 8, 128256, 131072) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "eos_token_id": [128001, 128008, 128009]}),
    "Llama-2-7b": (6.74, COMMON | sizes(4096, 11008, 32, 32, 32, 32000, 4096) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "_name_or_path": "x", "pretraining_tp": 1, "rms_norm_eps": 1e-5,
        "rope_scaling": None}),
    "SmolLM2-135M": (0.135, COMMON | sizes(576, 1536, 30, 9, 3, 49152, 8192) | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "is_llama_config": True, "rope_interleaved": False,
        "tie_word_embeddings": True, "rope_theta": 100000, "transformers.js_config": {"dtype": "q4"}, "mlp_bias": False,
        "attention_bias": False, "rms_norm_eps": 1e-5, "pad_token_id": 2, "pretraining_tp": 1, "rope_scaling": None}),
    "Mistral-7B-v0.3": (7.25, COMMON | sizes(4096, 14336, 32, 32, 8, 32768, 32768) | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}),
    "Mistral-Nemo": (12.25, COMMON | sizes(5120, 14336, 40, 32, 8, 131072, 1024000) | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "sliding_window": None}),
    "Mixtral-8x7B": (46.7, COMMON | sizes(4096, 14336, 32, 32, 8, 32000, 32768) | {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": None}),
    "Qwen2.5-7B": (7.62, COMMON | sizes(3584, 18944, 28, 28, 4, 152064, 32768) | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "sliding_window": 131072, "use_sliding_window": False}),
    "Qwen3-8B": (8.19, COMMON | sizes(4096, 12288, 36, 32, 8, 151936, 40960) | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "max_window_layers": 36,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False}),
    "Qwen3-30B-A3B": (30.5, COMMON | sizes(2048, 6144, 48, 32, 4, 151936, 40960) | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "rms_norm_eps": 1e-6, "rope_scaling": None,
        "rope_theta": 1e6, "router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False}),
    "gemma-2-9b": (9.24, TOKENS | sizes(3584, 14336, 42, 16, 8, 256000, 8192) | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096}),
    "Phi-3.5-mini": (3.82, COMMON | sizes(3072, 8192, 32, 32, 32, 32064, 131072) | {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "auto_map": {"AutoConfig": "x"}, "attention_bias": False,
        "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}, "sliding_window": 262144}),
    "Phi-4-mini": (3.84, COMMON | sizes(3072, 8192, 32, 24, 8, 200064, 131072) | {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "auto_map": {}, "attention_bias": False, "embd_pdrop": 0.0,
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}, "sliding_window": 262144,
        "tie_word_embeddings": True}),
    "gpt2": (0.124, {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5,
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True}}, "vocab_size": 50257}),
    "pythia-1.4b": (1.41, {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "num_attention_heads": 16, "num_hidden_layers": 24, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "use_parallel_residual": True,
        "vocab_size": 50304}),
    "falcon-7b": (6.92, {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0, "auto_map": {}, "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,
        "hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True, "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": 65024}),
    "gpt-oss-20b": (20.9, COMMON | sizes(2880, 2880, 24, 64, 8, 201088, 131072) | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "initial_context_length": 4096, "layer_types": ["sliding_attention", "full_attention"] * 12, "num_experts_per_tok": 4,
        "num_local_experts": 32, "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                         "rope_type": "yarn", "truncate": False},
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
        "sliding_window": 128, "swiglu_limit": 7.0}),
    "DeepSeek-V2-Lite": (15.7, COMMON | sizes(2048, 10944, 27, 16, 16, 102400, 163840) | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False, "auto_map": {},
        "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "kv_lora_rank": 512, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6,
        "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 1,
        "topk_method": "greedy", "v_head_dim": 128}),
    "DeepSeek-V3": (671.0, COMMON | sizes(7168, 18432, 61, 128, 128, 129280, 163840) | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "auto_map": {}, "ep_size": 1,
        "first_k_dense_replace": 3, "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128}),
    "GLM-4.5-Air": (106.0, COMMON | sizes(4096, 10944, 46, 96, 8, 151552, 131072) | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1,
        "head_dim": 128, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "topk_group": 1,
        "use_qk_norm": False}),
    "MiniMax-M2": (229.0, COMMON | sizes(3072, 1536, 62, 48, 8, 200064, 196608) | {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax", "attn_type_list": [1] * 62, "auto_map": {}, "head_dim": 128,
        "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
        "mlp_intermediate_size": 8192, "mtp_transformer_layers": 1, "num_experts_per_tok": 8, "num_local_experts": 256,
        "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-6, "rope_theta": 5000000,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                                "modules_to_not_convert": ["gate", "lm_head"], "weight_block_size": [128, 128]},
        "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None, "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True}),
    "phi-2": (2.78, TOKENS | sizes(2560, 10240, 32, 32, 32, 51200, 2048) | {
        "architectures": ["PhiForCausalLM"], "model_type": "phi", "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_act": "gelu_new",
        "initializer_range": 0.02, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.4, "qk_layernorm": False, "resid_pdrop": 0.1,
        "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False}),
}  # fmt: skip


def read(name: str) -> Decoder:
    return spec_from_config(FILES[name][1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FILES)
def test_size_that_the_card_names(name: str) -> None:
    """Billions of parameters, as the plan counts them; a config read wrong in any of its sizes gives another number."""
    count = sum(math.prod(item.shape) for item in plan(read(name)))
    assert count / 1e9 == pytest.approx(FILES[name][0], rel=0.01)


@pytest.mark.parametrize("name", FILES)
def test_explain(name: str) -> None:
    assert explain(read(name), batch=4, context=1024).rows
