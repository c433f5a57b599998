"""A model without weights that checks every promise of a Batch: it writes what it is given into the cache pages, reads each whole sequence
back through the page table, and chooses the next token from that history alone. A mistake in packing or paging changes its answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from pyllm.runtime.batch import Batch

VOCAB = 61
NAN_TOKEN = 60  # a sequence that ends in it gets a row of NaN
EOS = 7


class FakeSpec:
    def __init__(self, max_positions: int = 120, vocab_size: int = VOCAB) -> None:
        self.max_positions, self.vocab_size = max_positions, vocab_size

    def kv_slots(self):
        return {3: SimpleNamespace(kv_heads=2, head_dim=8, window=None)}


def hashed(history: Sequence[int]) -> int:
    """The next token of a history: any other history gives another one."""
    return zlib.crc32(np.asarray(history, np.int64).tobytes()) % (NAN_TOKEN - 1)


class FakeModel:
    """`module(batch)`: logits with `choose(history)` on top. steps: (tokens, sequences, rows) of each call."""

    def __init__(
        self, choose: Callable[[Sequence[int]], int] = hashed, vocab: int = VOCAB, peak: float = 9.0, nan_token: int = NAN_TOKEN
    ) -> None:
        self.choose, self.vocab, self.peak, self.nan_token = choose, vocab, peak, nan_token
        self.steps: list[tuple[int, int, int]] = []

    def __call__(self, b: Batch) -> torch.Tensor:
        assert list(b.caches) == [3]
        t, n = len(b.ids), len(b.kv_lens)
        wanted = torch.arange(t, dtype=torch.int32, device=b.ids.device) if b.logit_rows is None else b.logit_rows
        for name in ("ids", "positions", "slots", "q_starts", "kv_lens", "page_table", "logit_rows"):
            array = wanted if name == "logit_rows" else getattr(b, name)
            assert array.dtype == torch.int32, name
            assert array.device == b.caches[3].k.device, name
        assert b.positions.shape == b.slots.shape == (t,)
        assert b.page_table.shape[0] == n
        ids, positions, slots, starts, lens = (x.tolist() for x in (b.ids, b.positions, b.slots, b.q_starts, b.kv_lens))
        assert all(0 <= i < self.vocab for i in ids), "a token id that no vocabulary has"
        assert starts[0] == 0
        assert set(slots[starts[-1] :]) <= {-1}, "a token of no sequence is stored"
        assert len(starts) == n + 1
        real = [s for s in slots if s > 0]  # idle rows share place 0 of the dummy page
        assert len(set(real)) == len(real), "two tokens in one place of the cache"
        histories = self._histories(b, ids, positions, slots, starts, lens)
        ends = [e - 1 for e in starts[1:]]
        rows = wanted.tolist()
        assert rows == sorted(rows)
        self.steps.append((t, n, len(rows)))
        logits = torch.zeros(len(rows), self.vocab)
        for i, row in enumerate(rows):
            owner = next(j for j in range(n) if starts[j] <= row < starts[j + 1])
            history = histories[owner]
            if history is None:
                continue
            history = history[: len(history) - (ends[owner] - row)]
            logits[i, self.choose(history)] = self.peak
            if history[-1] == self.nan_token:
                logits[i, 11] = float("nan")
        return logits.to(b.ids.device)

    def _histories(self, b: Batch, ids, positions, slots, starts, lens) -> list[list[int] | None]:
        k, v = b.caches[3].k, b.caches[3].v
        pages, page_size = k.shape[:2]
        flat_k, flat_v = (c.view(pages * page_size, *c.shape[2:]) for c in (k, v))
        used = starts[-1]
        at = torch.tensor(slots[:used], device=k.device, dtype=torch.int64)
        flat_k[at] = b.ids[:used].to(k.dtype)[:, None, None].expand(-1, *k.shape[2:])
        flat_v[at] = b.positions[:used].to(v.dtype)[:, None, None].expand(-1, *v.shape[2:])
        tables = [set(table[: -(-length // page_size)]) for table, length in zip(b.page_table.tolist(), lens, strict=True)]
        out = []
        for i, length in enumerate(lens):
            first, end = starts[i : i + 2]
            if end == first:
                assert length == 0
                out.append(None)
                continue
            table = b.page_table[i].tolist()
            if set(table) == {0}:
                assert (end - first, length, slots[first], positions[first]) == (1, 1, 0, 0), "an idle row leaves the dummy page"
                out.append(None)
                continue
            assert positions[first:end] == list(range(length - (end - first), length))
            used = table[: -(-length // page_size)]
            assert all(0 < p < pages for p in used), "the dummy page or an unknown one is in use"
            assert all(0 <= p < pages for p in table)
            for page in {slot // page_size for slot in slots[first:end]}:
                assert sum(page in other for other in tables) == 1, "a page is written that another sequence reads"
            places = torch.tensor([used[j // page_size] * page_size + j % page_size for j in range(length)], device=k.device)
            assert slots[first:end] == places[positions[first] :].tolist()
            assert flat_v[places].unique(dim=1).shape[1] == 1
            assert flat_v[places, 0, 0].tolist() == list(range(length)), "a position of the sequence was never stored, or was overwritten"
            out.append([int(x) for x in flat_k[places, -1, -1].tolist()])
            assert out[-1][-(end - first) :] == ids[first:end]
        return out


def expected(prompt: Sequence[int], max_tokens: int, limit: int, choose: Callable = hashed, stops: Sequence[int] = ()) -> list[int]:
    """What a request must give, one token after the other."""
    history = list(prompt)
    while len(history) < min(len(prompt) + max_tokens, limit):
        history.append(choose(history))
        if history[-1] in stops:
            break
    return history[len(prompt) :]


class FakeDraft:
    """A second model: says `choose` of the history that its own cache holds, right or wrong, and checks nothing; token 0 without one."""

    def __init__(self, choose: Callable[[Sequence[int]], int], vocab: int = VOCAB) -> None:
        self.choose, self.vocab = choose, vocab

    def __call__(self, b: Batch) -> torch.Tensor:
        k = b.caches[3].k
        flat, size = k.view(-1, *k.shape[2:]), k.shape[1]
        used = int(b.q_starts[-1])
        flat[b.slots[:used].long()] = b.ids[:used].to(k.dtype)[:, None, None].expand(-1, *k.shape[2:])
        if b.logit_rows is not None:
            return torch.zeros(len(b.logit_rows), self.vocab)
        logits = torch.zeros(len(b.kv_lens), self.vocab)
        for i, (length, table) in enumerate(zip(b.kv_lens.tolist(), b.page_table.tolist(), strict=True)):
            at = [table[min(j // size, len(table) - 1)] * size + j % size for j in range(length)]
            history = flat[at, 0, 0].tolist()
            logits[i, self.choose([int(t) for t in history]) if not any(t != t for t in history) else 0] = 1.0
        return logits
