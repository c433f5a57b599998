"""Mixtral: Mistral with a mixture of experts in each layer, whose weights are renormalized over the chosen ones."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import Attn, Decoder, MoE, RMSNorm, Sub
from pyllm.models.hf import decoder

EXPERT = ("experts.{}.w1", "experts.{}.w3", "experts.{}.w2")  # gate, up, down


def mixtral(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, window=c.windows[i])
        moe = MoE("block_sparse_moe", d, c.intermediate_size, c.num_experts, c.num_experts_per_tok, c.act, names=EXPERT)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), moe)

    return decoder(c, layer, norm)
