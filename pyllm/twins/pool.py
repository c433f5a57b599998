"""The page allocator in plain Python: twin of `csrc/runtime/block_pool.cpp`, same results and messages, where there is no compiler."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

MAX_INT = 2**31 - 1
KEY_BYTES = 32
TOP_PRIORITY, PRIORITY = 100, 35  # those of TensorRT-LLM: 0 to 100, 35 where nothing is said
MOST_PAGES = MAX_INT - TOP_PRIORITY - 1


class BlockPool:
    """Which page ids are in use, by how many holders, and which unused ones still hold a known prefix.

    Page 0 is the dummy page: never handed out, so page-table tails and padding rows always name a page that exists and that nobody owns.
    The others are handed out last-freed-first, fresh ones in ascending order. Invariant: free + used + cached == total == pages - 1.

    A key of 32 bytes names the content of a full page and of all pages before it (see `keys.py`), so the keys of a sequence form a path of
    a prefix tree. A page with a key stays cached when its last holder leaves, and is given away again once no page is free: those of the
    lowest priority first, the least recently used first among them. Holders give their pages back in one call, deepest first, and each page
    then has at least the priority of those behind it, so it always goes after them: the next page to go is a leaf.
    """

    def __init__(self, pages: int) -> None:
        if not 2 <= pages <= MOST_PAGES:
            raise ValueError(f"BlockPool: pages is {pages}, expected 2 to {MOST_PAGES} (page 0 is the dummy page)")
        self._refs = [0] * pages
        self._free = list(range(pages - 1, 0, -1))
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._priority = [0] * pages  # 0 without a key
        # For each priority, the cached pages without a holder, least recently used first.
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(TOP_PRIORITY + 1)]

    @property
    def total(self) -> int:
        return len(self._refs) - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody holds and that a prefix may still be read from."""
        return sum(map(len, self._idle))

    @property
    def available(self) -> int:
        """Pages that `allocate` can give: free and cached ones."""
        return len(self._free) + self.cached

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int) -> NDArray[np.int32]:
        """`count` pages with one reference each, all or nothing (RuntimeError when fewer are free or cached)."""
        if count < 0:
            raise ValueError(f"BlockPool: allocate got count {count}, expected 0 or more")
        if count > self.available:
            raise RuntimeError(f"BlockPool: allocate wants {count} pages, {self.available} of {self.total} are free")
        for level in self._idle:
            while level and len(self._free) < count:
                page, _ = level.popitem(last=False)
                del self._page_of[self._key_of.pop(page)]
                self._priority[page] = 0
                self._free.insert(0, page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return np.array(pages, dtype=np.int32)

    def match(self, keys: bytes) -> NDArray[np.int32]:
        """The pages of the longest known beginning of these keys (32 bytes each), each with one holder more."""
        _require_keys(keys, "match")
        pages: list[int] = []
        for at in range(0, len(keys), KEY_BYTES):
            page = self._page_of.get(keys[at : at + KEY_BYTES])
            if page is None:
                break
            pages.append(page)
        for page in pages:
            self._idle[self._priority[page]].pop(page, None)
            self._refs[page] += 1
        return np.array(pages, dtype=np.int32)

    def cache(self, keys: bytes, pages: NDArray[np.int32], priorities: NDArray[np.int32] | None = None) -> int:
        """Name the content of held pages, in the order of their sequence; how many are now known by these keys.

        It stops at a key that names another page: a deeper page of this sequence would hang below a page that its holder does not hold.
        priorities: one for each page, none: PRIORITY for all. A known page keeps the higher of its own and the one given.
        """
        ids, given = _ints(pages), [] if priorities is None else _ints(priorities)
        _require_keys(keys, "cache")
        if len(keys) != KEY_BYTES * len(ids):
            raise ValueError(f"BlockPool: cache got {len(keys)} bytes of keys, expected {KEY_BYTES} for each of {len(ids)} pages")
        if given and len(given) != len(ids):
            raise ValueError(f"BlockPool: cache got {len(given)} priorities, expected one for each of {len(ids)} pages")
        for priority in given:
            if not 0 <= priority <= TOP_PRIORITY:
                raise ValueError(f"BlockPool: cache got priority {priority}, expected 0 to {TOP_PRIORITY}")
        for page in ids:
            self._require_page(page, "cache")
            if self._refs[page] == 0:
                raise ValueError(f"BlockPool: cache got page {page}, which is free")
        for i, page in enumerate(ids):
            key = keys[KEY_BYTES * i : KEY_BYTES * (i + 1)]
            if self._page_of.get(key, page) != page or self._key_of.get(page, key) != key:
                return i
            self._page_of[key], self._key_of[page] = page, key
            self._priority[page] = max(self._priority[page], given[i] if given else PRIORITY)
        return len(ids)

    def ref(self, pages: NDArray[np.int32]) -> None:
        """One more holder for each page, all or nothing."""
        ids = _ints(pages)
        for page in ids:
            self._require_page(page, "ref")
            if self._refs[page] == 0:
                raise ValueError(f"BlockPool: ref got page {page}, which is free")
        for page in ids:
            self._refs[page] += 1

    def free(self, pages: NDArray[np.int32]) -> None:
        """One holder less for each page, the last first; at none back to the pool, or cached.

        All or nothing: a double free is a ValueError.
        """
        ids = _ints(pages)
        for page in ids:
            self._require_page(page, "free")
        for i, page in enumerate(ids):
            if self._refs[page] == 0:
                for done in ids[:i]:
                    self._refs[done] += 1
                raise ValueError(f"BlockPool: free got page {page} once more than it is held (double free)")
            self._refs[page] -= 1
        behind = 0  # the highest priority of the pages behind this one
        for page in reversed(ids):
            if page in self._key_of:
                behind = self._priority[page] = max(self._priority[page], behind)
        for page in dict.fromkeys(reversed(ids)):
            if self._refs[page] == 0:
                if page in self._key_of:
                    self._idle[self._priority[page]][page] = None
                else:
                    self._free.append(page)

    def forget(self) -> None:
        """Drop every key: cached pages become free, held ones are not cached when their last holder leaves."""
        self._free[:0] = [page for level in reversed(self._idle) for page in reversed(level)]
        self._page_of.clear()
        self._key_of.clear()
        self._priority = [0] * len(self._refs)
        for level in self._idle:
            level.clear()

    def ref_count(self, page: int) -> int:
        self._require_page(page, "ref_count")
        return self._refs[page]

    def check(self) -> None:
        """RuntimeError unless each page is either held, or free, or cached, and keys and pages name each other."""
        listed = [False] * len(self._refs)
        idle = [page for level in self._idle for page in level]
        for page in (*self._free, *idle):
            waits = page in self._key_of and page in self._idle[self._priority[page]]
            if not 1 <= page <= self.total or listed[page] or self._refs[page] != 0 or (page in self._key_of) != waits:
                raise RuntimeError(f"BlockPool: page {page} is on the free list wrongly")
            listed[page] = True
        for page in range(1, self.total + 1):
            if self._refs[page] < 0 or (self._refs[page] == 0) != listed[page]:
                raise RuntimeError(f"BlockPool: page {page} is lost")
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise RuntimeError("BlockPool: keys and pages disagree")

    def _require_page(self, page: int, method: str) -> None:
        if not 1 <= page <= self.total:
            raise ValueError(f"BlockPool: {method} got page {page}, expected 1 to {self.total}")


def _require_keys(keys: bytes, method: str) -> None:
    if len(keys) % KEY_BYTES:
        raise ValueError(f"BlockPool: {method} got {len(keys)} bytes of keys, expected a multiple of {KEY_BYTES}")


def _ints(a: NDArray[np.int32]) -> list[int]:
    return require_ints(a).tolist()


def require_ints(a: NDArray[np.int32]) -> NDArray[np.int32]:
    """The arrays that both twins take: one-dimensional, int32, dense. Anything else is a TypeError, never a silent copy."""
    if not isinstance(a, np.ndarray) or a.dtype != np.int32 or a.ndim != 1 or not a.flags.c_contiguous:
        raise TypeError(
            f"expected a dense one-dimensional int32 array, got {getattr(a, 'dtype', type(a).__name__)} {getattr(a, 'shape', '')}"
        )
    return a
