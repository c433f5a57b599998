"""A paged cache in a few lines, for tests that run a bound model without the executor. Pages are handed out in a shuffled order, unused
ones are NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyllm.layers import Decoder
from pyllm.runtime.batch import Batch, KvCache


class Paged:
    """Caches for `lengths` sequences of one declaration; `step` makes the batch of the next tokens."""

    def __init__(
        self,
        spec: Decoder,
        sequences: int,
        longest: int,
        *,
        page: int = 16,
        tp: int = 1,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        width = -(-longest // page)
        order = torch.randperm(sequences * width + 3, generator=torch.Generator().manual_seed(seed)).int()
        self.device, self.page, self.table, self.lens = device, page, order[: sequences * width].view(sequences, width), [0] * sequences
        self.caches = {}
        for slot, s in spec.kv_slots().items():
            shape = (len(order), page, max(s.kv_heads // tp, 1), s.head_dim)
            self.caches[slot] = KvCache(*(torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)))

    def step(
        self, tokens: Sequence[Tensor], *, last: bool = False, known: Sequence[int] | None = None, **hooks: Callable[[Tensor], Tensor]
    ) -> Batch:
        """One ragged step: tokens[i] are the next ids of sequence i (may be empty). last: logits of each sequence's last token alone.
        known: lengths of the texts that the tokens are chunks of."""
        positions, slots = [], []
        for i, ids in enumerate(tokens):
            at = torch.arange(self.lens[i], self.lens[i] + len(ids))
            positions.append(at.int())
            slots.append((self.table[i][at // self.page] * self.page + at % self.page).int())
            self.lens[i] += len(ids)
        starts = torch.tensor([0, *[len(t) for t in tokens]]).cumsum(0).int()
        table = self.table.clone()
        for i, n in enumerate(self.lens):
            table[i, -(-n // self.page) :] = 2147480000
        rows = (starts[1:] - 1)[torch.tensor([len(t) > 0 for t in tokens])] if last else None
        lens = torch.tensor(self.lens).int()
        parts = (torch.cat(list(tokens)).int(), torch.cat(positions), torch.cat(slots), starts, lens, table)
        optional = (rows, None if known is None else torch.tensor(known).int())
        return Batch(*(t.to(self.device) for t in parts), self.caches, *(t if t is None else t.to(self.device) for t in optional), **hooks)
