"""StableLM: LayerNorm, partial rotary, optional q/k/v biases; attention and MLP one after the other or in parallel under one norm."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, LayerNorm, Sub, Sum
from pyllm.models.hf import decoder


def stablelm(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, d, c.layer_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, qkv_bias=c.use_qkv_bias)
        mlp = MLP("mlp", d, c.intermediate_size, c.act)
        if c.use_parallel_residual:
            return (Sub(at, norm("input_layernorm"), Sum((attn, mlp))),)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), mlp)

    return decoder(c, layer, norm)
