"""The page allocator in plain Python: twin of `csrc/runtime/block_pool.cpp`, same results and messages, where there is no compiler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MAX_INT = 2**31 - 1


class BlockPool:
    """Which page ids are in use, and by how many holders.

    Page 0 is the dummy page: never handed out, so page-table tails and padding rows always name a page that exists and that nobody owns.
    The others are handed out last-freed-first, fresh ones in ascending order. Invariant: available + used == total == pages - 1.
    """

    def __init__(self, pages: int) -> None:
        if not 2 <= pages <= MAX_INT:
            raise ValueError(f"BlockPool: pages is {pages}, expected 2 to {MAX_INT} (page 0 is the dummy page)")
        self._refs = [0] * pages
        self._free = list(range(pages - 1, 0, -1))

    @property
    def total(self) -> int:
        return len(self._refs) - 1

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - self.available

    def allocate(self, count: int) -> NDArray[np.int32]:
        """`count` pages with one reference each, all or nothing (RuntimeError when fewer are free)."""
        if count < 0:
            raise ValueError(f"BlockPool: allocate got count {count}, expected 0 or more")
        if count > self.available:
            raise RuntimeError(f"BlockPool: allocate wants {count} pages, {self.available} of {self.total} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return np.array(pages, dtype=np.int32)

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
        """One holder less for each page, back to the pool at none; all or nothing, a double free is a ValueError."""
        ids = _ints(pages)
        for page in ids:
            self._require_page(page, "free")
        for i, page in enumerate(ids):
            if self._refs[page] == 0:
                for done in ids[:i]:
                    self._refs[done] += 1
                raise ValueError(f"BlockPool: free got page {page} once more than it is held (double free)")
            self._refs[page] -= 1
        self._free.extend(page for page in dict.fromkeys(ids) if self._refs[page] == 0)

    def ref_count(self, page: int) -> int:
        self._require_page(page, "ref_count")
        return self._refs[page]

    def check(self) -> None:
        """RuntimeError unless the free list is exactly the set of pages without a holder."""
        listed = [False] * len(self._refs)
        for page in self._free:
            if not 1 <= page <= self.total or listed[page] or self._refs[page] != 0:
                raise RuntimeError(f"BlockPool: page {page} is on the free list wrongly")
            listed[page] = True
        for page in range(1, self.total + 1):
            if self._refs[page] < 0 or (self._refs[page] == 0) != listed[page]:
                raise RuntimeError(f"BlockPool: page {page} is lost")

    def _require_page(self, page: int, method: str) -> None:
        if not 1 <= page <= self.total:
            raise ValueError(f"BlockPool: {method} got page {page}, expected 1 to {self.total}")


def _ints(a: NDArray[np.int32]) -> list[int]:
    return require_ints(a).tolist()


def require_ints(a: NDArray[np.int32]) -> NDArray[np.int32]:
    """The arrays that both twins take: one-dimensional, int32, dense. Anything else is a TypeError, never a silent copy."""
    if not isinstance(a, np.ndarray) or a.dtype != np.int32 or a.ndim != 1 or not a.flags.c_contiguous:
        raise TypeError(
            f"expected a dense one-dimensional int32 array, got {getattr(a, 'dtype', type(a).__name__)} {getattr(a, 'shape', '')}"
        )
    return a
