"""Weights that a checkpoint stores in e4m3, with their scales, read as they are: stacked and cut, never rounded again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyllm.layers.spec import Part, Weight
from pyllm.layers.stored import BLOCK, E4M3, check_scales, check_values, scale_kind

Held = Callable[[Weight], list[tuple[str, "tuple[int, ...] | None"]]]
"""The names that a Weight is made from, in order, with the shapes of those that the checkpoint has."""
Get = Callable[[str, Any], Tensor]
W = TypeVar("W", bound="_Stored")


@dataclass(frozen=True)
class _Stored(Weight):
    @classmethod
    def of(cls: type[W], weight: Weight, **changed: Any) -> W:
        """The tensors beside (or in place of) a plain weight."""
        return cls(**{f.name: getattr(weight, f.name) for f in fields(Weight)} | {"keep": True, "fp32": False} | changed)

    def part_of(self, source: int) -> Part:
        return self.parts[source % len(self.parts)]


@dataclass(frozen=True)
class StoredE4m3(_Stored):
    def load(self, get: Get, path: str, rank: int, tp: int) -> Tensor:
        def checked(name: str, shape: tuple[int, ...]) -> Tensor:
            t = get(name, shape)
            if t.dtype != E4M3:
                raise ValueError(f"checkpoint tensor {name!r} is {t.dtype}, expected float8_e4m3fn beside its scales")
            check_values(name, t)
            return t

        return super().load(checked, path, rank, tp)


@dataclass(frozen=True)
class ChannelScale(_Stored):
    """A factor for each output row, or one for all of a part -> fp32 `[N]` (experts: `[E, N]`)."""

    def load(self, get: Get, path: str, rank: int, tp: int) -> Tensor:
        rows = []
        for i, name in enumerate(self.sources(path)):
            part, t = self.part_of(i), get(name, None)
            check_scales(name, t)
            t = t.float().reshape(-1).expand(part.of or part.size).narrow(0, part.start, part.size)
            rows.append(part.cut(t, 0, rank, tp) if self.shard == "col" else t)
        joined = [torch.cat(rows[i : i + len(self.parts)]) for i in range(0, len(rows), len(self.parts))]
        return torch.stack(joined) if self.experts else joined[0]


@dataclass(frozen=True)
class BlockScale(_Stored):
    """A factor for each 128 x 128 block -> fp32 `[ceil(N / 128), ceil(K / 128)]`."""

    def load(self, get: Get, path: str, rank: int, tp: int) -> Tensor:
        assert self.cols is not None
        wide, rows = -(-self.cols // BLOCK), []
        for i, name in enumerate(self.sources(path)):
            part, t = self.parts[i], get(name, None)
            check_scales(name, t)
            t, held = t.float().view(-1, wide), part.rows(tp) if self.shard == "col" else part.size
            ends = i == len(self.parts) - 1 and held == part.size and part.start + part.size == (part.of or part.size)
            self._fits(name, part.start, "rows start at")
            self._fits(name, part.size if self.shard == "col" and tp > 1 else 0, "ranks share rows:")
            self._fits(name, 0 if ends else held, "a rank (or part) holds rows:")
            t = t.narrow(0, part.start // BLOCK, -(-part.size // BLOCK))
            if self.shard == "row":
                self._fits(name, (self.cols // tp) if tp > 1 else 0, "a rank holds columns:")
                t = t.chunk(tp, 1)[rank]
            rows.append(part.cut(t, 0, rank, tp, BLOCK) if self.shard == "col" and tp > 1 else t)
        return torch.cat(rows)

    def aligned(self) -> bool:
        """Whether no block has rows of two parts."""
        return not any(p.start % BLOCK for p in self.parts) and not any(p.size % BLOCK for p in self.parts[:-1])

    @staticmethod
    def _fits(name: str, count: int, what: str) -> None:
        if count % BLOCK:
            raise ValueError(f"checkpoint tensor {name!r} has scales by blocks of {BLOCK}, but {what} {count}; expected a multiple")


@dataclass(frozen=True)
class ActScale(_Stored):
    """The scale of a product's input -> fp32 `[1]`, the largest of the parts', which all multiply the same rows."""

    def load(self, get: Get, path: str, rank: int, tp: int) -> Tensor:
        found = []
        for name in dict.fromkeys(self.sources(path)):
            try:
                t = get(name, None)
            except ValueError as error:
                raise ValueError(f"Fp8: activation is 'static', but {error}") from None
            if t.numel() != 1 or not t.is_floating_point() or not 0 < t.item() < float("inf"):
                raise ValueError(f"checkpoint tensor {name!r} is {t.dtype} {tuple(t.shape)}, expected one scale, finite and positive")
            found.append(t.float().reshape(1))
        return torch.stack(found).amax(0)

    @classmethod
    def of(cls, weight: Weight, **changed: Any) -> ActScale:
        return super().of(weight, suffix="input_scale", **changed)


def stored_scale(weight: Weight, granularity: str, held: Held) -> Weight | None:
    """The scales of this granularity that the checkpoint has for all parts of the weight, each of which it stores as a tensor `[N, K]`."""
    if weight.transform is not None or type(weight) is not Weight or weight.suffix != "weight" or weight.cols is None:
        return None
    kind: type[_Stored] = BlockScale if granularity == "block" else ChannelScale
    if kind is BlockScale and weight.experts:
        return None
    for suffix in ("weight_scale_inv", "weight_scale"):
        scale = kind.of(weight, suffix=suffix)
        found = held(scale)
        if all(shape is not None and _kind(scale, i, name, shape) == granularity for i, (name, shape) in enumerate(found)):
            return scale
    return None


def _kind(scale: _Stored, source: int, name: str, shape: tuple[int, ...]) -> str | None:
    part = scale.part_of(source)
    return scale_kind(name, shape, part.of or part.size, scale.cols or 0)
