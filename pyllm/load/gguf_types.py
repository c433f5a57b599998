"""The tensor types of GGUF: how many bytes a block takes, and the blocks we turn into numbers.

A row is a run of blocks. Blocks of 32 values, little-endian fp16 scale d (and minimum m) first:
  Q4_0  d, 16 bytes: low nibbles are values 0..15, high nibbles 16..31; (q - 8) * d
  Q4_1  d, m, 16 bytes the same way; q * d + m
  Q8_0  d, 32 signed bytes; q * d
Products and sums are rounded to fp32 one by one (no fused multiply-add), so the numbers are bitwise those of the reference decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

QK = 32
Decode = Callable[[torch.Tensor], torch.Tensor]


def _scale(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    values = torch.empty(packed.shape[0], QK, dtype=torch.float32)
    values[:, : QK // 2] = packed & 15
    values[:, QK // 2 :] = packed >> 4
    return values


def decode_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 18] bytes to [blocks, 32] fp32."""
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_scale(blocks, 0))


def decode_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 20] bytes to [blocks, 32] fp32."""
    return _nibbles(blocks[:, 4:]).mul_(_scale(blocks, 0)).add_(_scale(blocks, 2))


def decode_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """[blocks, 34] bytes to [blocks, 32] fp32."""
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_scale(blocks, 0))


@dataclass(frozen=True)
class GgufType:
    """`values` numbers in `nbytes` bytes. `dtype` is what a caller gets; `decode` is None where the bytes already are that dtype."""

    name: str
    values: int
    nbytes: int
    dtype: torch.dtype | None = None
    decode: Decode | None = None


# Types with no dtype are known by size, so that a file's layout can be checked, but not readable: using one is an error naming it.
# Q8_1 and Q8_K are left out: they exist in memory only, never in files.
TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4, torch.float32),
    1: GgufType("F16", 1, 2, torch.float16),
    2: GgufType("Q4_0", QK, 18, torch.float32, decode_q4_0),
    3: GgufType("Q4_1", QK, 20, torch.float32, decode_q4_1),
    6: GgufType("Q5_0", QK, 22),
    7: GgufType("Q5_1", QK, 24),
    8: GgufType("Q8_0", QK, 34, torch.float32, decode_q8_0),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    16: GgufType("IQ2_XXS", 256, 66),
    17: GgufType("IQ2_XS", 256, 74),
    18: GgufType("IQ3_XXS", 256, 98),
    19: GgufType("IQ1_S", 256, 50),
    20: GgufType("IQ4_NL", QK, 18),
    21: GgufType("IQ3_S", 256, 110),
    22: GgufType("IQ2_S", 256, 82),
    23: GgufType("IQ4_XS", 256, 136),
    24: GgufType("I8", 1, 1, torch.int8),
    25: GgufType("I16", 1, 2, torch.int16),
    26: GgufType("I32", 1, 4, torch.int32),
    27: GgufType("I64", 1, 8, torch.int64),
    28: GgufType("F64", 1, 8, torch.float64),
    29: GgufType("IQ1_M", 256, 56),
    30: GgufType("BF16", 1, 2, torch.bfloat16),
    34: GgufType("TQ1_0", 256, 54),
    35: GgufType("TQ2_0", 256, 66),
    39: GgufType("MXFP4", QK, 17),
    40: GgufType("NVFP4", 64, 36),
}
