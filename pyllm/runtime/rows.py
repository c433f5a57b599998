"""What the device keeps of each running request: one row from admission to the end, so that a decode step needs nothing from the host.

A row holds the last token, its position, the sampling parameters and the page table. The host writes a row when a request is admitted (or
gets another page) and clears it when the request ends; the device moves it on by one token per step. The host never writes the token: it
is the device's own sample, so a step can start before the host has seen the tokens of the step before.

A row without a request is idle: position 0 of a sequence of one key on the dummy page 0, which belongs to nobody. Padding a step to a
graph's batch size is to run idle rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyllm.ops.rows import advance_rows
from pyllm.runtime.batch import Batch, KvCache
from pyllm.runtime.request import Request
from pyllm.runtime.sample import to_device

# Scalars of a row, one tensor `[len, S]` of 32-bit words; the last three are floats.
POSITION, KV_LEN, ACTIVE, TOP_K, INDEX, TEMPERATURE, TOP_P, MIN_P = range(8)
_SCALARS = 8
_FLOATS = TEMPERATURE
_HEAD = 4 + _SCALARS  # of a staged update: row, seed (two words), scalars, token or -1; then the page table


class Rows:
    """S rows with W pages each. `requests[row]`: who holds it; decode steps run rows 0 .. `top`."""

    def __init__(self, *, max_batch: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.device, self._width = device, max_pages
        self.requests: list[Request | None] = [None] * max_batch
        self.top = self.count = self._hole = 0  # no row below the last one is free
        self.version = 0  # another one when requests have come or gone
        self._held: tuple[int, list[Request | None]] = 0, []
        self._shift, self._mask = page_size.bit_length() - 1, page_size - 1
        self.token = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._scalars = torch.zeros(_SCALARS, max_batch, dtype=torch.int32, device=device)
        self._scalars[KV_LEN] = 1
        self._seed = torch.zeros(max_batch, 2, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_batch, max_pages, dtype=torch.int32, device=device)
        self._page = torch.zeros(max_batch, 1, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_batch, dtype=torch.int32, device=device)  # where the token at `position` goes
        self._starts = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._staged: dict[int, Request | None] = {}
        self._chosen: dict[int, int] = {}
        self._moves: list[tuple[int, int]] = []

    def assign(self, request: Request) -> None:
        """The lowest free row; there is one when fewer than `max_batch` requests run."""
        row = self.requests.index(None, self._hole)
        self._hole = row + 1
        self.count += 1
        self.version += 1
        self.requests[row], request.row = request, row
        self.top = max(self.top, row + 1)
        self._staged[row] = request

    def held(self) -> list[Request | None]:
        """Who holds rows 0 .. `top`: the same list for as long as the version is, since a copy touches each request."""
        if self._held[0] != self.version:
            self._held = self.version, self.requests[: self.top]
        return self._held[1]

    def changed(self, request: Request, token: int = -1) -> None:
        """The request's pages are others now, or the host has chosen its last token (only where no step is under way)."""
        self._staged[request.row] = request
        if token >= 0:
            self._chosen[request.row] = token

    def clear(self, request: Request) -> None:
        self.count -= 1
        self.version += 1
        self._hole = min(self._hole, request.row)
        self.requests[request.row] = None
        self._staged[request.row] = None
        self._chosen.pop(request.row, None)
        request.row = -1
        while self.top and self.requests[self.top - 1] is None:
            self.top -= 1

    def compact(self) -> None:
        """Move the last rows into holes until there are none."""
        self.version += self.top > self.count
        while self.top > self.count:
            last, hole = self.top - 1, self.requests.index(None, self._hole)
            request, self._hole = self.requests[last], hole
            assert request is not None
            if self._staged.pop(last, None) is None:
                self._moves.append((last, hole))
                self._staged.pop(hole, None)
            else:  # the device does not know it yet, or not its last token
                self._staged[hole] = request
                if last in self._chosen:
                    self._chosen[hole] = self._chosen.pop(last)
            self.requests[hole], request.row = request, hole
            self.requests[last], self._staged[last] = None, None
            while self.top and self.requests[self.top - 1] is None:
                self.top -= 1

    def flush(self) -> list[tuple[int, int]]:
        """Bring the device up to date with the moves and changes since the last flush: one copy. Returns the moves (from, to)."""
        moves, self._moves = self._moves, []
        if moves:
            source, target = to_device(moves, self.device).unbind(1)
            for t, dim in ((self.token, 0), (self._slots, 0), (self._scalars, 1), (self._seed, 0), (self._table, 0)):
                t.index_copy_(dim, target, t.index_select(dim, source))
        if self._staged:
            host = torch.zeros(len(self._staged), _HEAD + self._width, dtype=torch.int32, pin_memory=self.device.type == "cuda")
            for line, (row, request) in zip(host.numpy(), self._staged.items(), strict=True):
                _fill(line, row, request, self._chosen.get(row, -1))
            new = host.to(self.device, non_blocking=True)
            rows = new[:, 0].long()
            self._seed.index_copy_(0, rows, new[:, 1:3])
            self._scalars.index_copy_(1, rows, new[:, 3 : 3 + _SCALARS].T)
            if self._chosen:
                chosen = new[:, _HEAD - 1]
                self.token.index_copy_(0, rows, torch.where(chosen < 0, self.token[rows], chosen))
                self._chosen.clear()
            self._table.index_copy_(0, rows, new[:, _HEAD:])
            self._staged.clear()
            self._place(len(self.requests))
        return moves

    def batch(self, n: int, caches: dict[int, KvCache]) -> Batch:
        """A decode step of rows 0 .. n - 1: all of it is there already."""
        return Batch(
            ids=self.token[:n], positions=self._scalars[POSITION, :n], slots=self._slots[:n], q_starts=self._starts[: n + 1],
            kv_lens=self._scalars[KV_LEN, :n], page_table=self._table[:n], caches=caches, max_q=1,
        )  # fmt: skip

    def advance(self, n: int, sampled: Tensor) -> None:
        """Rows 0 .. n - 1 have sampled these tokens and go one position further; a failed row (-1) goes on with token 0 until the host
        ends it."""
        position, kv_len, active = self._scalars[: ACTIVE + 1, :n]
        advance_rows(sampled, self.token[:n], position, kv_len, self._slots[:n], active, self._table[:n], self._mask + 1)

    def _place(self, n: int) -> None:
        position, slots = self._scalars[POSITION, :n], self._slots[:n]
        torch.bitwise_right_shift(position, self._shift, out=self._page[:n, 0])
        torch.bitwise_and(position, self._mask, out=slots)
        slots.add_(self._table[:n].gather(1, self._page[:n]).squeeze(1), alpha=self._mask + 1)

    def tables(self, rows: Tensor) -> Tensor:
        """Page tables of these rows, at full width."""
        return self._table.index_select(0, rows)

    def advance_some(self, rows: Tensor, tokens: Tensor) -> None:
        """The named rows (int64) have sampled `tokens` in a step that was packed by the host, and go one position further."""
        self.token.index_copy_(0, rows, tokens.clamp_min(0))
        self._scalars[POSITION:ACTIVE].index_add_(1, rows, self._scalars[ACTIVE].index_select(0, rows).expand(ACTIVE, -1))
        self._place(self.top)

    def sampling(self, rows: Tensor | int) -> dict[str, Tensor]:
        """Arguments of `sample_tokens` for the first rows (an int) or the named ones (int64)."""
        if isinstance(rows, int):
            scalars, seed = self._scalars[:, :rows], self._seed[:rows]
        else:
            scalars, seed = self._scalars.index_select(1, rows), self._seed.index_select(0, rows)
        floats = scalars[_FLOATS:].view(torch.float32)
        names = ("temperature", "top_p", "min_p")
        ints = {"top_k": scalars[TOP_K], "index": scalars[INDEX], "position": scalars[KV_LEN]}
        return ints | dict(zip(names, floats, strict=True)) | {"seed": seed.view(torch.int64).squeeze(1)}


def _fill(line: np.ndarray, row: int, request: Request | None, token: int) -> None:
    """One staged update. The position is that of the last token whose sampling was launched: the step that samples moves it on."""
    line[0], line[_HEAD - 1] = row, token
    if request is None:
        line[3 + KV_LEN] = 1
        return
    p, at = request.params, request.next_position
    line[1:3] = np.array([request.seed], np.int64).view(np.int32)
    line[3 : 3 + _FLOATS] = (at, at + 1, 1, p.top_k, request.index)
    line[3 + _FLOATS : 3 + _SCALARS] = np.array([p.temperature, p.top_p, p.min_p], np.float32).view(np.int32)
    line[_HEAD : _HEAD + len(request.pages)] = request.pages
