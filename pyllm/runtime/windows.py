"""Fewer pages for the layers that see a window of the last tokens alone: what slides out of it is given to others.

A page keeps one number over all layers. The caches of the layers with a window are smaller: a map on the device says at which place there
a page is, 0 (the dummy page) where it is nowhere; `Batch.paged` puts it in front of page table and slots. A request holds the places that
its window reaches into, and those that it writes next. A place that nobody holds keeps its keys until it is wanted, so a prefix can be
read again for as long as the last of its pages are there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pyllm.plan.pages import SlotSizes, Stored, window_needs
from pyllm.runtime.graph import graph_sizes, token_sizes
from pyllm.runtime.request import Request
from pyllm.runtime.sample import to_device


def step_sizes(
    decode: Sequence[int] | None,
    mixed: Sequence[int] | None,
    cuda: bool,
    max_batch: int,
    most: int,
    chunk: int,
    stored: Stored,
    dtype: torch.dtype,
    page_size: int,
) -> tuple[Sequence[int], Sequence[int]]:
    """Sizes of the steps that a GPU captures, where they are not given: of decodes, and with prompts if decodes are captured at all."""
    if not cuda:
        return decode or (), mixed or ()
    decode = graph_sizes(max_batch) if decode is None else decode
    if mixed is None:
        each = [token_sizes(most, chunk, s.kv_slots(), dtype, kind, page_size) for s, kind in stored]
        mixed = min(each, key=len) if decode else []
    return decode, mixed


class WindowPages:
    """Places of one window for `pages` pages: `of[page]`, on the host, and `map`, on the device."""

    def __init__(self, window: int, places: int, pages: int, page_size: int, device: torch.device) -> None:
        self.window, self.total, self._page_size = window, places - 1, page_size
        self.of = np.zeros(pages, np.int32)
        self.map = torch.zeros(pages, dtype=torch.int32, device=device)
        self._holders = np.zeros(pages, np.int32)
        self._free = list(range(places - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # pages with a place that nobody holds, the longest so first
        self._changed: set[int] = set()

    def first(self, position: int) -> int:
        """The first page that a token at `position` sees."""
        return max(position - self.window + 1, 0) // self._page_size

    def take(self, pages: NDArray[np.int32]) -> None:
        for page in pages.tolist():
            self._holders[page] += 1
            if self._holders[page] > 1:
                continue
            if self.of[page]:
                del self._idle[page]
                continue
            if not self._free:
                self._clear(next(iter(self._idle)))
            self.of[page] = self._free.pop()
            self._changed.add(page)

    def drop(self, pages: NDArray[np.int32]) -> None:
        """The last first, so that the end of a prefix is given away before its beginning."""
        for page in pages[::-1].tolist():
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._idle[page] = None

    def flush(self) -> None:
        if self._changed:
            pages = np.fromiter(self._changed, np.int64)
            new = to_device(np.stack([pages, self.of[pages]]), self.map.device)
            self.map.index_copy_(0, new[0], new[1].to(torch.int32))
            self._changed.clear()

    def check(self) -> None:
        """RuntimeError unless each place is free, or of one page."""
        placed = np.flatnonzero(self.of)
        places = sorted([*self._free, *self.of[placed].tolist()])
        if places != list(range(1, self.total + 1)) or {*placed.tolist()} != {*self._idle, *np.flatnonzero(self._holders).tolist()}:
            raise RuntimeError(f"WindowPages: places of the window {self.window} are lost, or two pages share one")

    def _clear(self, page: int) -> None:
        del self._idle[page]
        self._free.append(int(self.of[page]))
        self.of[page] = 0
        self._changed.add(page)


class Windows:
    """All windows of a model, and which pages each running request holds in them: those from `span[0]` up to `span[1]`."""

    def __init__(self, each: Mapping[int, WindowPages], page_size: int) -> None:
        self.each, self._page_size = each, page_size
        self._spans: dict[Request, list[list[int]]] = {}

    @classmethod
    def of(cls, slots: Mapping[int, SlotSizes], page_size: int, max_batch: int, step: int, pages: int, device: torch.device) -> Windows:
        needs = window_needs(slots, page_size, max_batch, step, pages)
        return cls({w: WindowPages(w, places, pages, page_size, device) for w, places in needs.items()}, page_size)

    def __bool__(self) -> bool:
        return bool(self.each)

    def readable(self, pages: NDArray[np.int32]) -> bool:
        """Whether a prefix of these pages can be read: a token behind it finds all that it sees."""
        return all(w.of[pages[w.first(len(pages) * self._page_size) :]].all() for w in self.each.values())

    def admit(self, request: Request) -> None:
        """The request holds what is seen of its reused prefix."""
        end = request.computed // self._page_size
        if self.each:
            self._spans[request] = [[w.first(request.computed), end] for w in self.each.values()]
        for window, (first, _) in self._of(request):
            window.take(request.pages[first:end])

    def reach(self, request: Request, start: int, end: int) -> None:
        """A step writes its tokens `start` .. `end`."""
        self.slide(request, start)
        pages = -(-end // self._page_size)
        for window, span in self._of(request):
            if pages > span[1]:
                window.take(request.pages[span[1] : pages])
                span[1] = pages

    def slide(self, request: Request, position: int) -> None:
        """The next token stands at `position`: what its windows do not reach is given up."""
        for window, span in self._of(request):
            first = window.first(position)
            if first > span[0]:
                window.drop(request.pages[span[0] : first])
                span[0] = first

    def leave(self, request: Request) -> None:
        for window, (first, end) in self._of(request):
            window.drop(request.pages[first:end])
        self._spans.pop(request, None)

    def flush(self) -> None:
        for window in self.each.values():
            window.flush()

    def check(self) -> None:
        for window in self.each.values():
            window.check()

    def _of(self, request: Request) -> Iterator[tuple[WindowPages, list[int]]]:
        return zip(self.each.values(), self._spans.get(request, ()), strict=False)
