"""Variants that the tests share: ALiBi, a document mask, a soft cap written by hand, and one that uses every place."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.jit import AttentionVariant, Param, ScorePlaces


def alibi_reference(s: Tensor, at: ScorePlaces, slopes: Tensor) -> Tensor:
    return s - slopes[at.h] * (at.q_pos - at.k_pos)


def alibi(heads: int) -> AttentionVariant:
    """Press et al. 2022, for a power of two of heads."""
    slopes = tuple(2.0 ** (-8 * (h + 1) / heads) for h in range(heads))
    return AttentionVariant("alibi", "s - slopes[h] * (q_pos - k_pos)", params=(Param("slopes", slopes),), reference=alibi_reference)


def document_reference(s: Tensor, at: ScorePlaces, document: Tensor, width: float) -> Tensor:
    row = document.view(-1, int(width))[at.b]
    return torch.where(row[at.q_pos] == row[at.k_pos], s, float("-inf"))


def document_mask(width: int) -> AttentionVariant:
    """Tokens see their own document alone; document: int32 `[B, width]`, the document of each position."""
    mask = "document[b * (int)width + q_pos] == document[b * (int)width + k_pos]"
    return AttentionVariant(
        "documents", mask=mask, params=(Param("document", "int32"), Param("width", width)), reference=document_reference
    )


def cap_reference(s: Tensor, at: ScorePlaces, cap: float) -> Tensor:
    return cap * torch.tanh(s / cap)


def soft_cap(cap: float) -> AttentionVariant:
    body = "const float x = s / cap;\nreturn cap * tanhf(x);"
    return AttentionVariant("capped", body, params=(Param("cap", cap),), reference=cap_reference)


def places_reference(s: Tensor, at: ScorePlaces, bias: Tensor, weight: float) -> Tensor:
    shift = bias[at.token] + 0.01 * at.h + 0.02 * at.b - 0.001 * at.kv_len + 0.003 * at.q_len
    return torch.where((at.q_pos + at.k_pos) % 3 != 0, s * weight + shift, float("-inf"))


def every_place(weight: float) -> AttentionVariant:
    """bias: fp32 `[T]`."""
    score = "s * weight + (bias[token] + 0.01f * h + 0.02f * b - 0.001f * kv_len + 0.003f * q_len)"
    params = (Param("bias", "float32"), Param("weight", weight))
    return AttentionVariant("places", score, "(q_pos + k_pos) % 3 != 0", params, places_reference)
