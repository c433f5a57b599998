"""Cohere 2 (Command R7B, Command A): Cohere with a window in three of four layers; the full layers have no rotation (NoPE)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, LayerNorm, Sub, Sum
from pyllm.models.hf import decoder


def cohere2(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias
    rope = replace(c.rope, interleaved=True)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, d, c.layer_norm_eps, bias=False)

    def layer(i: int) -> tuple[Sub, ...]:
        window = c.windows[i]
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=rope if window else None, window=window,
                    qkv_bias=bias, o_bias=bias)  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act)
        return (Sub(f"model.layers.{i}", norm("input_layernorm"), Sum((attn, mlp))),)

    return decoder(c, layer, norm, logit_scale=c.logit_scale)
