"""Llama 2 and 3.x, Mistral, SmolLM2: pre-norm, GQA, rotary, SwiGLU."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def llama(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at, bias = f"model.layers.{i}", c.attention_bias
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, window=c.windows[i], qkv_bias=bias, o_bias=bias)
        mlp = MLP("mlp", d, c.intermediate_size, c.act, bias=c.mlp_bias)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), mlp)

    return decoder(c, layer, norm)
