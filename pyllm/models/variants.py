"""Masks and scores of attention that a model's config asks for (`AttentionVariant`: as C++ and as PyTorch)."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from pyllm.jit.variant import AttentionVariant, Param, ScorePlaces

TEMPERED = "s * (1.0f + attn_scale * log1pf(floorf((q_pos + first) / floor_scale)))"


def tempered(attn_scale: float, floor_scale: float, first: float = 0.0) -> AttentionVariant:
    """Scores times `1 + attn_scale ln(1 + floor((position + first) / floor_scale))`: a long context's softmax stays as sharp.

    first: the number of the first position, which Llama 4 counts from 1."""
    params = (Param("attn_scale", attn_scale), Param("floor_scale", floor_scale), Param("first", first))
    return AttentionVariant("tempered", TEMPERED, params=params, reference=_tempered)


def chunked(c: SimpleNamespace, scores: bool = False) -> AttentionVariant:
    """A token sees the keys of its own chunk of `attention_chunk_size` positions; scores: `tempered` besides."""
    params, mask = (Param("chunk", float(c.attention_chunk_size)),), "q_pos / (int)chunk == k_pos / (int)chunk"
    if not scores:
        return AttentionVariant("chunked", mask=mask, params=params, reference=_chunked)
    return AttentionVariant("chunked_tempered", TEMPERED, mask, (*params, *tempered(c.attn_scale, c.floor_scale, 1.0).params), _both)


def _tempered(s: Tensor, at: ScorePlaces, attn_scale: float, floor_scale: float, first: float) -> Tensor:
    return s * (1 + attn_scale * torch.log1p(((at.q_pos + first) / floor_scale).floor()))


def _chunked(s: Tensor, at: ScorePlaces, chunk: float) -> Tensor:
    return torch.where(at.q_pos // int(chunk) == at.k_pos // int(chunk), s, float("-inf"))


def _both(s: Tensor, at: ScorePlaces, chunk: float, attn_scale: float, floor_scale: float, first: float) -> Tensor:
    return _chunked(_tempered(s, at, attn_scale, floor_scale, first), at, chunk)
