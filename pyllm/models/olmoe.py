"""OLMoE: q and k normed over all their heads, a mixture of experts in each layer."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import Attn, Decoder, MoE, RMSNorm, Sub
from pyllm.models.hf import decoder, expect


def olmoe(c: SimpleNamespace) -> Decoder:
    d, heads, bias = c.hidden_size, c.num_attention_heads, c.attention_bias
    expect(c, clip_qkv=None)

    def norm(name: str, size: int = d) -> RMSNorm:
        return RMSNorm(name, size, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, c.num_key_value_heads, c.head_dim, kv=i, rope=c.rope,
                    qk_norm=norm("{}_norm", heads * c.head_dim), whole_norm=True, qkv_bias=bias, o_bias=bias)  # fmt: skip
        moe = MoE("mlp", d, c.intermediate_size, c.num_experts, c.num_experts_per_tok, c.act, renormalize=c.norm_topk_prob)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), moe)

    return decoder(c, layer, norm)
