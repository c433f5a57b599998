"""Granite: a Llama with factors of the embedding, of every step, of the scores and of the logits."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def granite(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at, step = f"model.layers.{i}", c.residual_multiplier
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, scale=c.attention_multiplier,
                    qkv_bias=bias, o_bias=bias)  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act, bias=c.mlp_bias)
        return Sub(at, norm("input_layernorm"), attn, scale=step), Sub(at, norm("post_attention_layernorm"), mlp, scale=step)

    return decoder(c, layer, norm, embed_scale=c.embedding_multiplier, logit_scale=1 / c.logits_scaling)
