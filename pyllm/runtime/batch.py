"""One step's input, as tensors: the explicit argument of every layer's forward. No globals, no string keys.

Letters: T tokens of the step (all sequences ragged, one after the other), B sequences, W page-table width, P page size, K KV heads, D
head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pyllm.layers.rope import Rope


@dataclass(frozen=True)
class KvCache:
    """The pages of one KV slot: k, v `[pages, P, K, D]`; scales fp32 `[1]` or `[K]` where the cache is FP8, else None.

    pages int32: where a page of the batch is in this cache, if not at its own number (see windows.py).
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    pages: Tensor | None = None


def _identity(t: Tensor) -> Tensor:
    return t


@dataclass
class Batch:
    """ids, positions, slots `[T]`; q_starts `[B + 1]`; kv_lens `[B]`; page_table `[B, W]`; all int32 on one device.

    slots: page * P + offset where the token's keys and values go; negative: nowhere (padding rows).
    kv_lens: keys per sequence after this step's tokens are stored. logit_rows `[R]`: rows of the T whose logits are wanted; None: all.
    seq_lens `[B]`: tokens of each sequence that are known, of a prompt all although a chunk of it is in this step; None: kv_lens.
    max_q: the most tokens of one sequence in this step, where the host knows it: picks the attention kernel.
    reduce: sums a tensor over the ranks of a tensor-parallel group; gather: concatenates along the last dim over the ranks.
    tensors: by name, what attention variants ask each step for.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    q_starts: Tensor
    kv_lens: Tensor
    page_table: Tensor
    caches: Mapping[int, KvCache]
    logit_rows: Tensor | None = None
    seq_lens: Tensor | None = None
    max_q: int | None = None
    reduce: Callable[[Tensor], Tensor] = _identity
    gather: Callable[[Tensor], Tensor] = _identity
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    _rope: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _paged: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def paged(self, cache: KvCache) -> tuple[Tensor, Tensor]:
        """Page table and slots of this step in one cache; made once a step, shared by all layers with its window."""
        where = cache.pages
        if where is None:
            return self.page_table, self.slots
        if id(where) not in self._paged:
            size = cache.k.shape[1]
            table = where.index_select(0, self.page_table.flatten()).view(self.page_table.shape)
            at = where.index_select(0, self.slots.clamp_min(0) // size) * size + self.slots % size
            self._paged[id(where)] = table, torch.where(self.slots < 0, self.slots, at)
        return self._paged[id(where)]

    def rope(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """`(cos_sin [L, R] fp32, rows [T] int32)` of this step for one Rope; made once a step, shared by all its layers."""
        if rope not in self._rope:
            self._rope[rope] = rope.cos_sin(self)
        return self._rope[rope]

    def token_lens(self) -> Tensor:
        """`[T]` int32: for each token, the known length of its sequence: what length-dependent Ropes turn by, however a prompt is cut."""
        owner = torch.searchsorted(self.q_starts[1:], torch.arange(len(self.ids), device=self.ids.device, dtype=torch.int32), right=True)
        lens = self.kv_lens if self.seq_lens is None else self.seq_lens
        return lens[owner.clamp_max(len(lens) - 1)]
