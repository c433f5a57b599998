"""The tensor types of GGUF: how many bytes a block takes, and which blocks we turn into numbers (gguf_blocks.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import gguf_blocks as blocks

QK = 32
# Values decoded at a time: the intermediate tensors of a chunk (about 10 bytes a value) stay in a CPU's cache; a GPU wants few launches.
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 25}
Decode = Callable[[torch.Tensor], torch.Tensor]


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
    2: GgufType("Q4_0", QK, 18, torch.float32, blocks.decode_q4_0),
    3: GgufType("Q4_1", QK, 20, torch.float32, blocks.decode_q4_1),
    6: GgufType("Q5_0", QK, 22, torch.float32, blocks.decode_q5_0),
    7: GgufType("Q5_1", QK, 24, torch.float32, blocks.decode_q5_1),
    8: GgufType("Q8_0", QK, 34, torch.float32, blocks.decode_q8_0),
    10: GgufType("Q2_K", 256, 84, torch.float32, blocks.decode_q2_k),
    11: GgufType("Q3_K", 256, 110, torch.float32, blocks.decode_q3_k),
    12: GgufType("Q4_K", 256, 144, torch.float32, blocks.decode_q4_k),
    13: GgufType("Q5_K", 256, 176, torch.float32, blocks.decode_q5_k),
    14: GgufType("Q6_K", 256, 210, torch.float32, blocks.decode_q6_k),
    16: GgufType("IQ2_XXS", 256, 66),
    17: GgufType("IQ2_XS", 256, 74),
    18: GgufType("IQ3_XXS", 256, 98),
    19: GgufType("IQ1_S", 256, 50),
    20: GgufType("IQ4_NL", QK, 18, torch.float32, blocks.decode_iq4_nl),
    21: GgufType("IQ3_S", 256, 110),
    22: GgufType("IQ2_S", 256, 82),
    23: GgufType("IQ4_XS", 256, 136, torch.float32, blocks.decode_iq4_xs),
    24: GgufType("I8", 1, 1, torch.int8),
    25: GgufType("I16", 1, 2, torch.int16),
    26: GgufType("I32", 1, 4, torch.int32),
    27: GgufType("I64", 1, 8, torch.int64),
    28: GgufType("F64", 1, 8, torch.float64),
    29: GgufType("IQ1_M", 256, 56),
    30: GgufType("BF16", 1, 2, torch.bfloat16),
    34: GgufType("TQ1_0", 256, 54),
    35: GgufType("TQ2_0", 256, 66),
    39: GgufType("MXFP4", QK, 17, torch.float32, blocks.decode_mxfp4),
    40: GgufType("NVFP4", 64, 36),
}
