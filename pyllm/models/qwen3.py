"""Qwen 3: q and k normed per head before the rotation."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import Attn, Decoder, RMSNorm
from pyllm.models.qwen2 import attention, late_window, pre_norm


def normed_attention(c: SimpleNamespace, i: int, window: int | None) -> Attn:
    norm, bias = RMSNorm("{}_norm", c.head_dim, c.rms_norm_eps), c.attention_bias
    return attention(c, i, window, qk_norm=norm, qkv_bias=bias, o_bias=bias)


def qwen3(c: SimpleNamespace) -> Decoder:
    return pre_norm(c, lambda i: normed_attention(c, i, late_window(c, i)))
