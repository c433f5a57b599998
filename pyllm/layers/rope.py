"""Rotary position embedding: every variant is a set of inverse frequencies, a factor, and a rule for which line of a table a token uses.

Angles are fp32 products of an fp32 inverse frequency and an fp32 position, as in transformers, so that long positions agree with it.
Sources: linear and dynamic NTK (transformers), llama3 (Llama 3.1), YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024; Phi-3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyllm.layers.typed import Typed

if TYPE_CHECKING:
    from pyllm.runtime.batch import Batch


@dataclass(frozen=True)
class LinearScaling(Typed):
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicNtk(Typed):
    """theta grows with the sequence once it is longer than `original` positions."""

    factor: float
    original: int


@dataclass(frozen=True)
class Llama3(Typed):
    """Low frequencies divided by `factor`, high ones kept, a linear blend between (none where the two factors are equal)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original: int


@dataclass(frozen=True)
class Yarn(Typed):
    """Interpolated below `beta_slow` rotations, extrapolated above `beta_fast`, a ramp between; cos and sin times `attention_factor`."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1, or the mscale ratio
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class LongRope(Typed):
    """One factor per frequency: `short` while the sequence fits `original` positions, `long` beyond."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float
    attention_factor: float | None = None  # None: sqrt(1 + ln(factor) / ln(original))


TABLE_NUMBERS = 1 << 26  # 256 MiB: 2^19 positions of 128 dims; the 10 million of Llama 4 Scout would take 5 GiB
Scaling = LinearScaling | DynamicNtk | Llama3 | Yarn | LongRope


@dataclass(frozen=True)
class Rope(Typed):
    """Rotates the first `dim` of each head's dims. interleaved: pairs (2i, 2i+1) instead of (i, i + dim/2)."""

    dim: int
    theta: float = 1e4
    max_positions: int = 8192
    scaling: Scaling | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"Rope: dim is {self.dim}, expected a positive even number")
        if not self.theta > 1:
            raise ValueError(f"Rope: theta is {self.theta}, expected more than 1")
        if not isinstance(self.max_positions, int) or self.max_positions < 1:
            raise ValueError(f"Rope: max_positions is {self.max_positions!r}, expected a positive integer")
        if self.scaling is not None:
            self._check_scaling(self.scaling)

    def _check_scaling(self, s: Scaling) -> None:
        if not isinstance(s, (LinearScaling, DynamicNtk, Llama3, Yarn, LongRope)):
            raise ValueError(f"Rope: scaling is {s!r}, expected None or one of LinearScaling, DynamicNtk, Llama3, Yarn, LongRope")
        kind = type(s).__name__
        for name in ("factor", "original", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(s, name, None)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"Rope: {kind}.{name} is {value!r}, expected a positive number")
        if isinstance(s, Llama3) and s.high_freq_factor < s.low_freq_factor:
            raise ValueError(f"Rope: Llama3.high_freq_factor is {s.high_freq_factor}, expected {s.low_freq_factor} or more")
        if isinstance(s, DynamicNtk) and self.dim < 4:
            raise ValueError(f"Rope: dim is {self.dim}, expected at least 4 with DynamicNtk")
        if isinstance(s, LongRope):
            if not len(s.short) == len(s.long) == self.dim // 2:
                raise ValueError(f"Rope: longrope has {len(s.short)} short and {len(s.long)} long factors, expected {self.dim // 2}")
            if not (s.original > 1 and min(s.short + s.long) > 0):
                raise ValueError(f"Rope: LongRope.original is {s.original}, expected more than 1, and positive short and long factors")

    def cos_sin(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """`(table [L, dim] fp32: cos then sin, rows [T] int32)` for one step's tokens."""
        device = batch.ids.device
        if isinstance(self.scaling, DynamicNtk):  # frequencies depend on each sequence's length: one line per token
            angles = batch.positions.float()[:, None] * dynamic_inv_freq(self, batch.token_lens())
            return torch.cat([angles.cos(), angles.sin()], -1), torch.arange(len(batch.ids), dtype=torch.int32, device=device)
        long = self._takes_long_factors(batch)
        if self.max_positions * self.dim * (1 if long is None else 2) > TABLE_NUMBERS:  # a line per token too: the same products
            freqs, factor = _line_freqs(self, device)
            angles = batch.positions.float()[:, None] * (freqs[:1] if long is None else freqs[long.long()])
            lines = torch.cat([angles.cos() * factor, angles.sin() * factor], -1)
            return lines, torch.arange(len(batch.ids), dtype=torch.int32, device=device)
        rows = batch.positions
        if long is not None:  # the second half of the table holds the long factors
            rows = torch.where(long, rows + self.max_positions, rows)
        return table(self, device), rows

    def _takes_long_factors(self, batch: Batch) -> Tensor | None:
        """`[T]` bool for LongRope: the token's sequence is past `original`."""
        return batch.token_lens() > self.scaling.original if isinstance(self.scaling, LongRope) else None


def _plain(rope: Rope, device: torch.device | str = "cpu") -> Tensor:
    return 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.int64, device=device).float() / rope.dim)


def dynamic_inv_freq(rope: Rope, lens: Tensor) -> Tensor:
    """`[T, dim/2]`: theta * ((factor * len / original) - (factor - 1)) ** (dim / (dim - 2)) for sequences longer than `original`."""
    s = rope.scaling
    assert isinstance(s, DynamicNtk)
    length = lens.clamp_min(s.original).double()
    base = rope.theta * (s.factor * length / s.original - (s.factor - 1)) ** (rope.dim / (rope.dim - 2))
    exponent = torch.arange(0, rope.dim, 2, device=lens.device).float() / rope.dim
    return 1.0 / base.float()[:, None] ** exponent


def inv_freqs(rope: Rope) -> tuple[list[Tensor], float]:
    """Inverse frequencies `[dim/2]` fp32 (two sets for longrope: short, long) and the factor of cos and sin."""
    f, s = _plain(rope), rope.scaling
    if isinstance(s, LinearScaling):
        return [f / s.factor], 1.0
    if isinstance(s, Llama3):
        wavelength = 2 * math.pi / f
        low, high = s.original / s.low_freq_factor, s.original / s.high_freq_factor
        between = s.high_freq_factor - s.low_freq_factor or 1.0  # equal factors (Llama 4): a step, and no frequency lies between
        smooth = (s.original / wavelength - s.low_freq_factor) / between
        blend = (1 - smooth) * f / s.factor + smooth * f
        return [torch.where(wavelength > low, f / s.factor, torch.where(wavelength < high, f, blend))], 1.0
    if isinstance(s, Yarn):
        return [_yarn(rope, s)], _yarn_factor(s)
    if isinstance(s, LongRope):
        factor = s.attention_factor
        if factor is None:
            factor = 1.0 if s.factor <= 1 else math.sqrt(1 + math.log(s.factor) / math.log(s.original))
        exponent = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
        return [1.0 / (torch.tensor(x, dtype=torch.float32) * rope.theta**exponent) for x in (s.short, s.long)], factor
    return [f], 1.0


def _yarn(rope: Rope, s: Yarn) -> Tensor:
    def dim_of(rotations: float) -> float:
        return rope.dim * math.log(s.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(s.beta_fast), dim_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    powers = rope.theta ** (torch.arange(0, rope.dim, 2).float() / rope.dim)
    return 1.0 / (s.factor * powers) * ramp + 1.0 / powers * (1 - ramp)


def _yarn_factor(s: Yarn) -> float:
    def get(scale: float, mscale: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return get(s.factor, s.mscale) / get(s.factor, s.mscale_all_dim)
    return get(s.factor)


@lru_cache(maxsize=32)
def _line_freqs(rope: Rope, device: torch.device) -> tuple[Tensor, float]:
    """`[1, dim/2]`, longrope: `[2, dim/2]`, short then long."""
    freqs, factor = inv_freqs(rope)
    return torch.stack(freqs).to(device), factor


@lru_cache(maxsize=32)
def table(rope: Rope, device: torch.device) -> Tensor:
    """cos and sin of positions 0 .. max_positions-1, `[max_positions, dim]` fp32; longrope: `[2 * max_positions, dim]`, short then long."""
    freqs, factor = inv_freqs(rope)
    position = torch.arange(rope.max_positions, device=device).float()[:, None]
    angles = torch.cat([position * f.to(device) for f in freqs])
    return torch.cat([angles.cos() * factor, angles.sin() * factor], -1)
