"""Gemma 2: sandwich norms (w + 1), a window in every other layer, soft caps on scores and logits."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def gemma2(c: SimpleNamespace) -> Decoder:
    d, scale = c.hidden_size, c.query_pre_attn_scalar**-0.5

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps, plus_one=True)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        window = c.windows[i] if c.layer_types else c.sliding_window if i % 2 == 0 else None
        attn = Attn("self_attn", d, c.num_attention_heads, c.num_key_value_heads, c.head_dim, kv=i, rope=c.rope, window=window,
                    softcap=c.attn_logit_softcapping, scale=scale, qkv_bias=c.attention_bias, o_bias=c.attention_bias)  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act)
        return (
            Sub(at, norm("input_layernorm"), attn, norm("post_attention_layernorm")),
            Sub(at, norm("pre_feedforward_layernorm"), mlp, norm("post_feedforward_layernorm")),
        )

    return decoder(c, layer, norm, embed_scale=d**0.5, logit_softcap=c.final_logit_softcapping)
