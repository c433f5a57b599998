"""Names of page contents for prefix reuse: SHA-256 chained over the pages of a sequence, from a salt.

A key decides alone whether two pages hold the same keys and values (their tokens are not compared again), so it must not be possible to
make two prefixes of one key: hence a cryptographic hash. Requests with different salts never share a page, so that a caller cannot tell
from the time to the first token what others have asked. Price: about 1 us for a page of 64 tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray


def root_key(salt: str) -> bytes:
    return sha256(b"pyllm page keys\0" + salt.encode()).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: NDArray[np.int32], pages: int, page_size: int) -> None:
    """Append to `keys` until it has one for each of the first `pages` full pages of `tokens`."""
    for i in range(len(keys), pages):
        block = tokens[i * page_size : (i + 1) * page_size].tobytes()
        keys.append(sha256((keys[-1] if keys else root) + block).digest())


class PageTexts:
    """What the named pages hold, by the name of the page before them: a prompt that parts from all of them reads the beginning of one."""

    SIBLINGS = 32  # so many of the latest pages behind one page are looked at: comparing one takes about 2 us

    def __init__(self, most: int) -> None:
        self._most = most  # pages: as many as the pool has, so older names are out of use, or nearly
        self._of: OrderedDict[bytes, tuple[bytes, NDArray[np.int32]]] = OrderedDict()
        self._behind: dict[bytes, dict[bytes, None]] = {}

    def add_pages(self, names: list[bytes], tokens: NDArray[np.int32], page_size: int, first: int, end: int) -> None:
        """names: of nothing (`root_key`), and of each page of `tokens`, of which those from `first` up to `end` are new."""
        for i in range(first, end):
            self.add(names[i], names[i + 1], tokens[i * page_size : (i + 1) * page_size])

    def add(self, before: bytes, key: bytes, tokens: NDArray[np.int32]) -> None:
        if key not in self._of:
            self._of[key] = before, tokens.copy()
            self._behind.setdefault(before, {})[key] = None
            if len(self._of) > self._most:
                self.remove(next(iter(self._of)))

    def remove(self, key: bytes) -> None:
        before, _ = self._of.pop(key)
        del self._behind[before][key]
        if not self._behind[before]:
            del self._behind[before]

    def best(self, before: bytes, tokens: NDArray[np.int32]) -> tuple[bytes, int]:
        """The page behind `before` that shares the longest beginning with these tokens, and how many of them; 0 without one."""
        found, most = b"", 0
        for key, _ in zip(reversed(self._behind.get(before, {})), range(self.SIBLINGS), strict=False):
            held = self._of[key][1][: len(tokens)]
            differs = np.flatnonzero(held != tokens[: len(held)])
            count = int(differs[0]) if len(differs) else len(held)
            if count > most:
                found, most = key, count
        return found, most
