"""SmolLM3: Llama in which some layers have no rotation (NoPE)."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Sub
from pyllm.models.hf import decoder


def smollm3(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias
    rotated = c.no_rope_layers  # despite its name 1 is a layer with rotation
    if rotated is None:
        rotated = tuple((i + 1) % c.no_rope_layer_interval for i in range(c.num_hidden_layers))
    if len(rotated) < c.num_hidden_layers:
        raise ValueError(f"config: no_rope_layers has {len(rotated)} entries, expected num_hidden_layers={c.num_hidden_layers} or more")

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at, rope = f"model.layers.{i}", c.rope if rotated[i] else None
        window = c.windows[i] if c.layer_types or not rotated[i] else None
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=rope, window=window, qkv_bias=bias, o_bias=bias)
        mlp = MLP("mlp", d, c.intermediate_size, c.act, bias=c.mlp_bias)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), mlp)

    return decoder(c, layer, norm)
