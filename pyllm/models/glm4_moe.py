"""GLM-4.5, 4.6: half of each head rotated, q and k normed per head in the large one, experts chosen with a bias beside a shared one."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, MoE, RMSNorm, Sub
from pyllm.models.hf import decoder


def glm4_moe(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, ff = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.moe_intermediate_size
    shared = MLP("shared_experts", d, ff * c.n_shared_experts, c.act) if c.n_shared_experts else None

    def norm(name: str, size: int = d) -> RMSNorm:
        return RMSNorm(name, size, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, qkv_bias=c.attention_bias,
                    qk_norm=norm("{}_norm", c.head_dim) if c.use_qk_norm else None)  # fmt: skip
        moe = MoE("mlp", d, ff, c.num_experts, c.num_experts_per_tok, c.act, "sigmoid", c.norm_topk_prob, c.routed_scaling_factor,
                  "gate.e_score_correction_bias", shared, groups=(c.n_group, c.topk_group), fp32_router=True)  # fmt: skip
        body = moe if i >= c.first_k_dense_replace else MLP("mlp", d, c.intermediate_size, c.act)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), body)

    return decoder(c, layer, norm, ignore=(f"model.layers.{c.num_hidden_layers}.*",))  # it predicts the token after the next
