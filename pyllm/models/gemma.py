"""Gemma 1: norms of w + 1, an embedding scaled by sqrt(d), GeGLU with the tanh approximation."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def gemma(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias
    act = "gelu_tanh" if c.act == "gelu" else c.act  # the first published files say "gelu" and mean the approximation

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps, plus_one=True)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, qkv_bias=bias, o_bias=bias)
        mlp = MLP("mlp", d, c.intermediate_size, act)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), mlp)

    return decoder(c, layer, norm, embed_scale=d**0.5)
