"""gpt-oss: a window in every other layer, a sink for each head, biases, experts with a clamped SwiGLU, stacked and interleaved."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import Attn, Decoder, MoE, RMSNorm, Sub
from pyllm.models.hf import decoder

STACKED = ("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj")


def gpt_oss(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads, bias = c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.attention_bias

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, d, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, window=c.windows[i], sinks=True,
                    qkv_bias=bias, o_bias=bias)  # fmt: skip
        moe = MoE("mlp", d, c.intermediate_size, c.num_experts, c.num_experts_per_tok, scoring="topk_softmax", router="router",
                  names=STACKED, bias=True, clamp=(c.swiglu_alpha, c.swiglu_limit), stacked=True, interleaved=True)  # fmt: skip
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), moe)

    return decoder(c, layer, norm)
