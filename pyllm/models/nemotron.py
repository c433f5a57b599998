"""Nemotron, Minitron: LayerNorm stored as w - 1, half of each head rotated, a plain MLP with squared ReLU."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, LayerNorm, Sub
from pyllm.models.hf import decoder


def nemotron(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, d, c.layer_norm_eps, plus_one=True)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, qkv_bias=bias, o_bias=bias)
        mlp = MLP("mlp", d, c.intermediate_size, c.act, gated=False, bias=c.mlp_bias)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), mlp)

    return decoder(c, layer, norm)
