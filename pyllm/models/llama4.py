"""Llama 4 (text): rotated layers see their own chunk, in NoPE layers scores grow with the position; top-1 experts and a shared one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, MoE, RMSNorm, Sub
from pyllm.models.gpt_oss import STACKED
from pyllm.models.hf import decoder
from pyllm.models.variants import chunked, tempered


def llama4(c: SimpleNamespace) -> Decoder:
    d, n, heads, kv_heads, bias = c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.attention_bias
    step, rope, sparse = c.interleave_moe_layer_step, replace(c.rope, interleaved=True), c.moe_layers
    sparse = range(step - 1, n, step) if sparse is None else sparse
    rotated = c.no_rope_layers or tuple((i + 1) % c.no_rope_layer_interval for i in range(n))  # despite its name 1 is one with rotation
    types = c.layer_types or ["chunked_attention" if r and c.attention_chunk_size else "full_attention" for r in rotated[:n]]
    if len(rotated) < n:
        raise ValueError(f"config: no_rope_layers has {len(rotated)} entries, expected num_hidden_layers={n} or more")

    def norm(name: str, size: int = d, stored: bool = True) -> RMSNorm:
        return RMSNorm(name, size, c.rms_norm_eps, stored=stored)

    def layer(i: int) -> tuple[Sub, ...]:
        at, scores = f"model.layers.{i}", not rotated[i] and c.attn_temperature_tuning
        variant = chunked(c, scores) if types[i] == "chunked_attention" else tempered(c.attn_scale, c.floor_scale, 1.0) if scores else None
        qk_norm = norm("{}_norm", c.head_dim, stored=False) if rotated[i] and c.use_qk_norm else None  # a rotation leaves it alone
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=rope if rotated[i] else None, qk_norm=qk_norm,
                    qkv_bias=bias, o_bias=bias, variant=variant)  # fmt: skip
        moe = MoE("feed_forward", d, c.intermediate_size, c.num_experts, c.num_experts_per_tok, c.act, "sigmoid", renormalize=False,
                  shared=MLP("shared_expert", d, c.intermediate_size, c.act), router="router", names=STACKED, stacked=True,
                  scale_inputs=True)  # fmt: skip
        body = moe if i in sparse else MLP("feed_forward", d, c.intermediate_size_mlp, c.act)
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), body)

    return decoder(c, layer, norm)
