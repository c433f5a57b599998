"""Phi-3, Phi-3.5 mini, Phi-4: a Llama whose q/k/v and gate/up are one tensor each; long contexts by LongRoPE."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def phi3(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    attn_names, mlp_names = ("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"), ("gate_up_proj", "gate_up_proj", "down_proj")

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, window=c.windows[i], names=attn_names)
        mlp = MLP("mlp", d, c.intermediate_size, c.act, names=mlp_names)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), mlp)

    return decoder(c, layer, norm)
