"""DeepSeek V2, V3: low-rank attention (MLA), shared experts beside those routed to in the best groups, which V3 chooses with a bias."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import MLA, MLP, Decoder, MoE, RMSNorm, Sub
from pyllm.models.hf import decoder, expect
from pyllm.models.ropes import long_scale


def deepseek(c: SimpleNamespace, interleaved: bool, correction: str | None, groups: tuple[int, int] | None) -> Decoder:
    d, dim, ff = c.hidden_size, c.qk_nope_head_dim + c.qk_rope_head_dim, c.moe_intermediate_size
    heads, rope = c.num_attention_heads, replace(c.rope, interleaved=interleaved)
    shared = MLP("shared_experts", d, ff * c.n_shared_experts, c.act, bias=c.mlp_bias) if c.n_shared_experts else None

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at, sparse = f"model.layers.{i}", i >= c.first_k_dense_replace and i % c.moe_layer_freq == 0
        attn = MLA("self_attn", d, heads, c.num_key_value_heads, dim, kv=i, rope=rope, scale=dim**-0.5 * long_scale(rope),
                   o_bias=c.attention_bias, kv_rank=c.kv_lora_rank, v_dim=c.v_head_dim, q_rank=c.q_lora_rank or None)  # fmt: skip
        moe = MoE("mlp", d, ff, c.num_experts, c.num_experts_per_tok, c.act, c.scoring_func, c.norm_topk_prob, c.routed_scaling_factor,
                  correction, shared, groups=groups, fp32_router=True)  # fmt: skip
        body = moe if sparse else MLP("mlp", d, c.intermediate_size, c.act, bias=c.mlp_bias)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), body)

    return decoder(c, layer, norm, ignore=(f"model.layers.{c.num_hidden_layers}.*",))  # it predicts the token after the next


def deepseek_v2(c: SimpleNamespace) -> Decoder:
    expect(c, scoring_func="softmax", norm_topk_prob=False, topk_method=("greedy", "group_limited_greedy"))
    return deepseek(c, True, None, None if c.topk_method == "greedy" else (c.n_group, c.topk_group))


def deepseek_v3(c: SimpleNamespace) -> Decoder:
    expect(c, scoring_func="sigmoid", topk_method="noaux_tc")
    return deepseek(c, c.rope_interleave, "gate.e_score_correction_bias", (c.n_group, c.topk_group))
