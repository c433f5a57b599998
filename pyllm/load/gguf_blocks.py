"""The blocks of GGUF's quantized types, turned into numbers: [blocks, bytes] uint8 to [blocks, values] fp32.

Scales d (and minima m) are little-endian fp16. Products and sums are rounded to fp32 one by one (no fused multiply-add) and in the order
of the reference decoder, so the numbers are bitwise its own. "Halves": the low nibbles of a run of bytes come first, then the high ones.

Blocks of 32 values:
  Q4_0   d, 16 bytes in halves; (q - 8) d             Q4_1  d, m, 16 bytes in halves; q d + m
  Q5_0   d, 32 fifth bits, 16 bytes; (q - 16) d       Q5_1  d, m, 32 fifth bits, 16 bytes; q d + m
  Q8_0   d, 32 signed bytes; q d                      IQ4_NL  d, 16 bytes in halves; NONLINEAR[q] d
  MXFP4  e, 16 bytes in halves; 2^(e - 128) times twice the e2m1 number, so that all of them are integers
Blocks of 256 values, scales of 16 (Q2, Q3, Q6) or 32 (Q4, Q5, IQ4_XS) values each:
  Q2_K   16 bytes (scale, minimum as nibbles), 64 bytes of 2 bits, d, dmin; (d s) q - dmin m
  Q3_K   32 bytes of third bits, inverted, 64 bytes of 2 bits, 12 bytes of 6-bit scales, d; (d (s - 32)) (q - 4 [bit is 0])
  Q4_K   d, dmin, 12 bytes of 6-bit scales and minima, 128 bytes in halves of 32; (d s) q - dmin m
  Q5_K   the same with 32 bytes of fifth bits before the nibbles
  Q6_K   128 bytes of nibbles in halves of 64, 64 bytes of 2 high bits, 16 signed scales, d; (d s) (q - 32)
  IQ4_XS d, 8 x 2 high bits and 8 x 4 low bits of the scales, 128 bytes in halves of 16; (d (s - 32)) NONLINEAR[q]
"""

from __future__ import annotations

import torch
from torch import Tensor

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at`: [blocks, 1] fp32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, run: int, width: int) -> Tensor:
    """Fields of `width` bits of runs of `run` bytes: all the lowest fields of a run, then all the next ones. [blocks, values] uint8."""
    n, count, mask = packed.shape[0], 8 // width, (1 << width) - 1
    runs = packed.reshape(n, -1, run)
    out = torch.empty(n, runs.shape[1], count, run, dtype=torch.uint8, device=packed.device)
    for i in range(count):  # shifts by a number are vectorized, those by a tensor are not: ten times slower on a CPU
        torch.bitwise_and(runs >> width * i, mask, out=out[:, :, i])
    return out.view(n, -1)


def _bits32(blocks: Tensor, at: int) -> Tensor:
    """The 32 bits at byte `at`, lowest first: [blocks, 32] uint8."""
    return _fields(blocks[:, at : at + 4], 1, 1)


def _look_up(table: tuple[int, ...], index: Tensor) -> Tensor:
    values = torch.tensor(table, dtype=torch.float32, device=index.device)
    return values.index_select(0, index.view(-1).int()).view(index.shape)


def _scaled(scales: Tensor, q: Tensor) -> Tensor:
    """Each of [blocks, groups] scales times its own group of q, in place: [blocks, values]."""
    n = scales.shape[0]
    return q.view(n, scales.shape[1], -1).mul_(scales.unsqueeze(-1)).view(n, -1)


def _shifted(scales: Tensor, q: Tensor, minima: Tensor) -> Tensor:
    n = scales.shape[0]
    return q.view(n, scales.shape[1], -1).mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1)).view(n, -1)


def decode_q4_0(b: Tensor) -> Tensor:
    return _fields(b[:, 2:], 16, 4).float().sub_(8).mul_(_half(b, 0))


def decode_q4_1(b: Tensor) -> Tensor:
    return _fields(b[:, 4:], 16, 4).float().mul_(_half(b, 0)).add_(_half(b, 2))


def decode_q5_0(b: Tensor) -> Tensor:
    return (_fields(b[:, 6:], 16, 4) | _bits32(b, 2) << 4).float().sub_(16).mul_(_half(b, 0))


def decode_q5_1(b: Tensor) -> Tensor:
    return (_fields(b[:, 8:], 16, 4) | _bits32(b, 4) << 4).float().mul_(_half(b, 0)).add_(_half(b, 2))


def decode_q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].view(torch.int8).float().mul_(_half(b, 0))


def decode_iq4_nl(b: Tensor) -> Tensor:
    return _look_up(NONLINEAR, _fields(b[:, 2:], 16, 4)).mul_(_half(b, 0))


def decode_mxfp4(b: Tensor) -> Tensor:
    e = b[:, :1].to(torch.int32)
    scale = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23)  # 2^(e - 128): subnormal for e of 0 and 1
    return _look_up(E2M1_TWICE, _fields(b[:, 1:], 16, 4)).mul_(scale.view(torch.float32))


def decode_q2_k(b: Tensor) -> Tensor:
    scales, minima = (b[:, :16] & 15).float().mul_(_half(b, 80)), (b[:, :16] >> 4).float().mul_(_half(b, 82))
    return _shifted(scales, _fields(b[:, 16:80], 32, 2).float(), minima)


def decode_q3_k(b: Tensor) -> Tensor:
    low, high = _fields(b[:, 96:104], 8, 4), _fields(b[:, 104:108], 4, 2)
    scales = (low | high << 4).float().sub_(32).mul_(_half(b, 108))
    q = _fields(b[:, 32:96], 32, 2).float() - (4 - 4 * _fields(b[:, :32], 32, 1).float())
    return _scaled(scales, q)


def _scales_and_minima(b: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes 4..15 of Q4_K and Q5_K: 6 bits each of 8 scales and 8 minima, times d and dmin."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], 1)
    minima = torch.cat([mid & 63, (high >> 4) | ((mid >> 2) & 48)], 1)
    return scales.float().mul_(_half(b, 0)), minima.float().mul_(_half(b, 2))


def decode_q4_k(b: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(b)
    return _shifted(scales, _fields(b[:, 16:], 32, 4).float(), minima)


def decode_q5_k(b: Tensor) -> Tensor:
    scales, minima = _scales_and_minima(b)
    return _shifted(scales, (_fields(b[:, 48:], 32, 4) | _fields(b[:, 16:48], 32, 1) << 4).float(), minima)


def decode_q6_k(b: Tensor) -> Tensor:
    scales = b[:, 192:208].view(torch.int8).float().mul_(_half(b, 208))
    return _scaled(scales, (_fields(b[:, :128], 64, 4) | _fields(b[:, 128:192], 32, 2) << 4).float().sub_(32))


def decode_iq4_xs(b: Tensor) -> Tensor:
    low = _fields(b[:, 4:8], 1, 4)  # two scales in each byte
    word = b[:, 2:4].contiguous().view(torch.int16).int()
    high = ((word >> torch.arange(0, 16, 2, dtype=torch.int32, device=b.device)) & 3).to(torch.uint8)
    scales = (low | high << 4).float().sub_(32).mul_(_half(b, 0))
    return _scaled(scales, _look_up(NONLINEAR, _fields(b[:, 8:], 16, 4)))
