"""ALiBi as Falcon's checkpoints were made with it: a slope for each head times the position of the key, both rounded to bf16."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyllm.jit.variant import AttentionVariant, Param, ScorePlaces

SCORE = "s + factor * __bfloat162float(__float2bfloat16(slopes[h] * __bfloat162float(__float2bfloat16((float)k_pos))))"


def slopes(heads: int) -> tuple[float, ...]:
    """Press et al. 2022: a geometric series for the largest power of two of heads, every second of a finer one for those left."""
    power = 2 ** int(math.log2(heads))
    bases = [2.0 ** -(8 * (h + 1) / power) for h in range(power)]
    bases += [2.0 ** -(4 * (2 * h + 1) / power) for h in range(heads - power)]
    return tuple(torch.tensor(bases).bfloat16().tolist())


def alibi(heads: int, factor: float) -> AttentionVariant:
    """Scores plus `factor * slope * position of the key`: a row's softmax sees the distance, as a sum that all its keys share is lost."""
    return AttentionVariant("alibi", SCORE, params=(Param("slopes", slopes(heads)), Param("factor", factor)), reference=_alibi)


def _alibi(s: Tensor, at: ScorePlaces, slopes: Tensor, factor: float) -> Tensor:
    return s + factor * (slopes[at.h] * at.k_pos.bfloat16().float()).bfloat16().float()
