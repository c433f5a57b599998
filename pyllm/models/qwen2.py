"""Qwen 2 and 2.5: biases for q, k, v, none for o; a window, where there is one, in the last layers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pyllm.layers import MLP, Attn, Decoder, RMSNorm, Spec, Sub
from pyllm.models.hf import decoder


def attention(c: SimpleNamespace, i: int, window: int | None, **fields: Any) -> Attn:
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    return Attn("self_attn", c.hidden_size, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, window=window, **fields)


def late_window(c: SimpleNamespace, i: int) -> int | None:
    """Without layer_types the first max_window_layers layers see everything."""
    return c.windows[i] if c.layer_types or i >= c.max_window_layers else None


def pre_norm(c: SimpleNamespace, attn: Callable[[int], Attn], mlp: Callable[[int], Spec | None] = lambda i: None) -> Decoder:
    """Layers of attn(i) and mlp(i), None being a dense MLP."""

    def norm(name: str) -> RMSNorm:
        return RMSNorm(name, c.hidden_size, c.rms_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at, body = f"model.layers.{i}", mlp(i) or MLP("mlp", c.hidden_size, c.intermediate_size, c.act)
        return Sub(at, norm("input_layernorm"), attn(i)), Sub(at, norm("post_attention_layernorm"), body)

    return decoder(c, layer, norm)


def qwen2(c: SimpleNamespace) -> Decoder:
    return pre_norm(c, lambda i: attention(c, i, late_window(c, i), qkv_bias=True))
