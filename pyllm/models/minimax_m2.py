"""MiniMax M2: q and k normed over all their heads, half of each head rotated, experts in each layer chosen by sigmoid and a bias."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import Attn, Decoder, MoE, RMSNorm, Sub
from pyllm.models.hf import decoder, expect
from pyllm.models.mixtral import EXPERT


def minimax_m2(c: SimpleNamespace) -> Decoder:
    d, heads = c.hidden_size, c.num_attention_heads
    expect(c, attn_type_list=(None, (1,) * c.num_hidden_layers), use_qk_norm=True, scoring_func="sigmoid")

    def norm(name: str, size: int = d) -> RMSNorm:
        return RMSNorm(name, size, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"model.layers.{i}"
        attn = Attn("self_attn", d, heads, c.num_key_value_heads, c.head_dim, kv=i, rope=c.rope,
                    qk_norm=norm("{}_norm", heads * c.head_dim), whole_norm=True)  # fmt: skip
        moe = MoE("block_sparse_moe", d, c.intermediate_size, c.num_experts, c.num_experts_per_tok, c.act, "sigmoid",
                  correction="e_score_correction_bias", names=EXPERT)  # fmt: skip
        return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), moe)

    return decoder(c, layer, norm)
