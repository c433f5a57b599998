"""Gemma 3 (text): Gemma 2 with norms of q and k in place of the soft caps, five windowed layers to a full one, a rope for each kind."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def gemma3(c: SimpleNamespace) -> Decoder:
    d, scale, bias = c.hidden_size, c.query_pre_attn_scalar**-0.5, c.attention_bias

    def norm(name: str, size: int = d) -> RMSNorm:
        return RMSNorm(name, size, c.rms_norm_eps, plus_one=True)

    def layer(i: int) -> tuple[Sub, ...]:
        at, window = f"model.layers.{i}", c.windows[i]
        attn = Attn("self_attn", d, c.num_attention_heads, c.num_key_value_heads, c.head_dim, kv=i,
                    rope=c.local_rope if window else c.rope, window=window, scale=scale,
                    qk_norm=norm("{}_norm", c.head_dim), qkv_bias=bias, o_bias=bias)  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act)
        return (
            Sub(at, norm("input_layernorm"), attn, norm("post_attention_layernorm")),
            Sub(at, norm("pre_feedforward_layernorm"), mlp, norm("post_feedforward_layernorm")),
        )

    return decoder(c, layer, norm, embed_scale=d**0.5, logit_softcap=c.final_logit_softcapping)
