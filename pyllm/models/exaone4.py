"""EXAONE 4: norms after each step, q and k normed per head; where some layers have a window, the others have no rotation (NoPE)."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def exaone4(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads

    def norm(name: str, size: int = d) -> RMSNorm:
        return RMSNorm(name, size, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at, window = f"model.layers.{i}", c.windows[i]
        rope = c.rope if window or not c.sliding_window else None
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=rope, window=window, qk_norm=norm("{}_norm", c.head_dim))
        mlp = MLP("mlp", d, c.intermediate_size, c.act)
        return Sub(at, None, attn, norm("post_attention_layernorm")), Sub(at, None, mlp, norm("post_feedforward_layernorm"))

    return decoder(c, layer, norm)
