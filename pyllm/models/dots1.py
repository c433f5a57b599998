"""dots.llm1: the attention of Qwen 3, and the experts of DeepSeek V3."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, MoE
from pyllm.models.qwen2 import late_window, pre_norm
from pyllm.models.qwen3 import normed_attention


def dots1(c: SimpleNamespace) -> Decoder:
    d, ff = c.hidden_size, c.moe_intermediate_size
    shared = MLP("shared_experts", d, ff * c.n_shared_experts, c.act) if c.n_shared_experts else None

    def attn(i: int) -> Attn:
        return normed_attention(c, i, late_window(c, i))

    def experts(i: int) -> MoE | None:
        if i < c.first_k_dense_replace:
            return None
        return MoE("mlp", d, ff, c.num_experts, c.num_experts_per_tok, c.act, "sigmoid", c.norm_topk_prob, c.routed_scaling_factor,
                   "gate.e_score_correction_bias", shared, groups=(c.n_group, c.topk_group), fp32_router=True)  # fmt: skip

    return pre_norm(c, attn, experts)
