"""Fewer pages for the layers that see a window of the last tokens alone: what slides out of it is given to others.

A page keeps one number over all layers. The caches of the layers with a window are smaller: a map on the device says at which place there
a page is, 0 (the dummy page) where it is nowhere; `Batch.paged` puts it in front of page table and slots. A request holds the places that
its window reaches into, and those that it writes next. A place that nobody holds keeps its keys until it is wanted, so a prefix can be
read again for as long as the last of its pages are there. Places are given away as pages are: those of the lowest priority first, the least
recently used first among them; before all others those whose page has gone to somebody else, who has not written to it yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from pyllm.plan.pages import SlotSizes, window_needs
from pyllm.runtime.request import Plan, Request
from pyllm.runtime.sample import to_device
from pyllm.twins.pool import PRIORITY


class WindowPages:
    """Places of one window for `pages` pages: `of[page]`, on the host, and `map`, on the device."""

    def __init__(self, window: int, places: int, pages: int, page_size: int, device: torch.device) -> None:
        self.window, self.total, self._page_size = window, places - 1, page_size
        self.of = np.zeros(pages, np.int32)
        self.map = torch.zeros(pages, dtype=torch.int32, device=device)
        self._holders = np.zeros(pages, np.int32)
        self._free = list(range(places - 1, 0, -1))
        self._worth = np.zeros(pages, np.int32)  # priority of what a place holds
        # For each priority, pages with a place that nobody holds, the longest so first.
        self._idle: dict[int, OrderedDict[int, None]] = {}
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
                self._leave_idle(page)
                continue
            if not self._free:
                self._clear(next(iter(self._idle[min(self._idle)])))
            self.of[page] = self._free.pop()
            self._changed.add(page)

    def renew(self, pages: NDArray[np.int32], worth: int) -> None:
        """Somebody is going to write to these pages, which nobody holds: what their places held is known no more."""
        for page in pages[self.of[pages] > 0].tolist():
            self._clear(page)
        self._worth[pages] = worth

    def drop(self, pages: NDArray[np.int32], worth: NDArray[np.int32] | None) -> None:
        """The last first, so that the end of a prefix is given away before its beginning. worth: priorities, None: as they are."""
        if worth is not None:
            self._worth[pages] = np.maximum(self._worth[pages], worth)
        for page in pages[::-1].tolist():
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._idle.setdefault(int(self._worth[page]), OrderedDict())[page] = None

    def forget(self) -> None:
        """No place that nobody holds is worth keeping."""
        for page in [page for level in self._idle.values() for page in level]:
            self._clear(page)

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
        idle = {page for level in self._idle.values() for page in level}
        if places != list(range(1, self.total + 1)) or {*placed.tolist()} != idle | {*np.flatnonzero(self._holders).tolist()}:
            raise RuntimeError(f"WindowPages: places of the window {self.window} are lost, or two pages share one")

    def _leave_idle(self, page: int) -> None:
        level = self._idle[int(self._worth[page])]
        del level[page]
        if not level:
            del self._idle[int(self._worth[page])]

    def _clear(self, page: int) -> None:
        self._leave_idle(page)
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
        self.renew(request, end)

    def renew(self, request: Request, first: int) -> None:
        """The request's pages from `first` on are new to it."""
        for window in self.each.values():
            window.renew(request.pages[first:], 0 if request.retention else PRIORITY)

    def launching(self, plan: Plan) -> None:
        """Places for what the step writes, in the caches of each window."""
        for request in plan.decodes if self.each else ():
            self._reach(request, request.next_position, request.next_position + 1)
        for chunk in (*plan.drafts, *plan.chunks) if self.each else ():
            self._reach(chunk.request, chunk.start, chunk.start + chunk.count)
        self.flush()

    def launched(self, plan: Plan) -> None:
        for request in (*plan.decodes, *(c.request for c in plan.chunks)) if self.each else ():
            self.slide(request, request.next_position if request.decoding else request.computed)

    def _reach(self, request: Request, start: int, end: int) -> None:
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
                window.drop(request.pages[span[0] : first], self._priorities(request, span[0], first, window))
                span[0] = first

    def leave(self, request: Request) -> None:
        for window, (first, end) in self._of(request):
            window.drop(request.pages[first:end], self._priorities(request, first, end, window))
        self._spans.pop(request, None)

    def _priorities(self, request: Request, first: int, end: int, window: WindowPages) -> NDArray[np.int32] | None:
        """Of its pages `first` up to `end`: the highest of those that are read together with one, so that a prefix goes as a whole."""
        each = request.priorities(first, min(end + window.window // self._page_size + 1, len(request.pages)), self._page_size)
        return None if each is None else np.maximum.accumulate(each[::-1])[::-1][: end - first]

    def forget(self) -> None:
        for window in self.each.values():
            window.forget()

    def flush(self) -> None:
        for window in self.each.values():
            window.flush()

    def check(self) -> None:
        for window in self.each.values():
            window.check()

    def _of(self, request: Request) -> Iterator[tuple[WindowPages, list[int]]]:
        return zip(self.each.values(), self._spans.get(request, ()), strict=False)
