"""Qwen 1.5/2 MoE (a shared expert with a gate of its own) and Qwen 3 MoE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pyllm.layers import MLP, Attn, Decoder, MoE
from pyllm.models.qwen2 import attention, pre_norm
from pyllm.models.qwen3 import normed_attention


def experts(c: SimpleNamespace, i: int, **fields: Any) -> MoE | None:
    """In every decoder_sparse_step-th layer that mlp_only_layers does not name; the others are dense."""
    if i in c.mlp_only_layers or (i + 1) % c.decoder_sparse_step:
        return None
    sizes = (c.hidden_size, c.moe_intermediate_size, c.num_experts, c.num_experts_per_tok)
    return MoE("mlp", *sizes, c.act, renormalize=c.norm_topk_prob, **fields)


def qwen2_moe(c: SimpleNamespace) -> Decoder:
    shared = MLP("shared_expert", c.hidden_size, c.shared_expert_intermediate_size, c.act)

    def attn(i: int) -> Attn:
        """Without layer_types every other one of the first max_window_layers layers has the window."""
        window = c.windows[i] if c.layer_types or (i % 2 == 0 and i < c.max_window_layers) else None
        return attention(c, i, window, qkv_bias=c.qkv_bias)

    return pre_norm(c, attn, lambda i: experts(c, i, shared=shared, shared_gate="shared_expert_gate"))


def qwen3_moe(c: SimpleNamespace) -> Decoder:
    return pre_norm(c, lambda i: normed_attention(c, i, c.windows[i]), lambda i: experts(c, i))
