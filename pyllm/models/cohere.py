"""Cohere (Command R, R+): attention and MLP in parallel under one LayerNorm without bias, interleaved rotary pairs, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, LayerNorm, Sub, Sum
from pyllm.models.hf import decoder


def cohere(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias
    rope = replace(c.rope, interleaved=True)

    def norm(name: str, size: int = d) -> LayerNorm:
        return LayerNorm(name, size, c.layer_norm_eps, bias=False)

    def layer(i: int) -> tuple[Sub, ...]:
        qk_norm = norm("{}_norm", c.head_dim) if c.use_qk_norm else None
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=rope, qk_norm=qk_norm, qkv_bias=bias, o_bias=bias)
        mlp = MLP("mlp", d, c.intermediate_size, c.act)
        return (Sub(f"model.layers.{i}", norm("input_layernorm"), Sum((attn, mlp))),)

    return decoder(c, layer, norm, logit_scale=c.logit_scale)
