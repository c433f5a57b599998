"""GLM (first generation, glm-4-9b): a Llama with half of each head rotated in interleaved pairs, gate and up in one tensor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def glm(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    rope = replace(c.rope, interleaved=True)

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=rope, qkv_bias=c.attention_bias)
        mlp = MLP("mlp", d, c.intermediate_size, c.act, names=("gate_up_proj", "gate_up_proj", "down_proj"))
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), mlp)

    return decoder(c, layer, norm)
