"""OLMo 3: OLMo 2 with a window in three of four layers; the scaling of the rope is that of the full layers alone."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def olmo3(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at, qk_norm, window = f"model.layers.{i}", RMSNorm("{}_norm", heads * c.head_dim, c.rms_norm_eps), c.windows[i]
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.local_rope if window else c.rope, window=window,
                    qk_norm=qk_norm, whole_norm=True, qkv_bias=bias, o_bias=bias)  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act)
        return Sub(at, None, attn, norm("post_attention_layernorm")), Sub(at, None, mlp, norm("post_feedforward_layernorm"))

    return decoder(c, layer, norm)
