"""What becomes of cached pages when others need their place: told as events, and kept in the host's memory for a while.

The pool gives a page away when it is wanted; what it held is then copied to pinned memory before anything is written to it, and copied back
when a prompt asks for it again. All copies are enqueued on the engine's stream in the order of the decisions, before the step they belong
to, so none has to be waited for.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyllm.twins.pool import KEY_BYTES

if TYPE_CHECKING:
    from pyllm.runtime.host import BlockPool
    from pyllm.runtime.kv import KvPool

Move = tuple[str, int, int]
"""("copy", page, page), ("save", page, host page) or ("load", host page, page)."""


class HostPages:
    """Host pages by the name of what they hold, least recently used first."""

    def __init__(self, pages: int) -> None:
        self._of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._of)

    def find(self, keys: list[bytes]) -> list[int]:
        """The host pages of the longest known beginning of these keys."""
        found: list[int] = []
        for key in keys:
            if key not in self._of:
                break
            self._of.move_to_end(key)
            found.append(self._of[key])
        return found

    def place(self, key: bytes, busy: set[int]) -> int | None:
        """A host page for this content, if it needs one and there is one that no copy under way is to read."""
        if key in self._of:
            self._of.move_to_end(key)
            return None
        if not self._free:
            old = next((k for k, at in self._of.items() if at not in busy), None)
            if old is None:
                return None
            self._free.append(self._of.pop(old))
        self._of[key] = self._free.pop()
        return self._of[key]

    def clear(self) -> None:
        self._free += self._of.values()
        self._of.clear()


class WatchedPool:
    """A `BlockPool` that tells which names come and go, and keeps in `host` what goes. Its other methods are the pool's own.

    moves: where copies are put, in order. most_events: the latest so many are kept; 0: none.
    """

    def __init__(self, pool: BlockPool, moves: list[Move], host_pages: int, most_events: int) -> None:
        self._pool, self._moves, self.host = pool, moves, HostPages(host_pages)
        self._key_of: dict[int, bytes] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=most_events)
        self._next = 0
        self.reading: set[int] = set()  # host pages that a load in `moves` is to read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def allocate(self, count: int) -> NDArray[np.int32]:
        pages = self._pool.allocate(count)
        gone = [(page, key) for page in pages.tolist() if (key := self._key_of.pop(page, None)) is not None]
        for page, key in gone:
            place = self.host.place(key, self.reading)
            if place is not None:
                self._moves.append(("save", page, place))
        self._tell("removed", [key for _, key in gone])
        return pages

    def cache(self, keys: bytes, pages: NDArray[np.int32], priorities: NDArray[np.int32] | None = None) -> int:
        known = self._pool.cache(keys, pages, priorities)
        new = []
        for i, page in enumerate(pages[:known].tolist()):
            key = keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]
            if self._key_of.get(page) != key:
                self._key_of[page] = key
                new.append(key)
        self._tell("stored", new)
        return known

    def load(self, keys: list[bytes], pages: int) -> list[int]:
        """The host pages that hold the beginning of these keys, at a multiple of so many; no save takes them before they are read."""
        found = self.host.find(keys)
        found = found[: len(found) // pages * pages]
        self.reading.update(found)
        return found

    def forget(self) -> None:
        self._pool.forget()
        self._tell("removed", list(self._key_of.values()))
        self._key_of.clear()
        self.host.clear()

    def take_events(self) -> list[dict[str, Any]]:
        events = list(self._events)
        self._events.clear()
        return events

    def _tell(self, what: str, keys: list[bytes]) -> None:
        if keys and self._events.maxlen:
            self._events.append({"event_id": self._next, "data": {"type": what, "block_hashes": [k.hex() for k in keys]}})
            self._next += 1


def watched(
    pool: BlockPool, caches: Sequence[KvPool], host_bytes: int, events: int, windows: bool
) -> tuple[BlockPool | WatchedPool, list[Move]]:
    """The pool, as it is or one that tells what comes and goes; and where it puts its copies."""
    moves: list[Move] = []
    if not host_bytes and not events:
        return pool, moves
    pages = host_bytes // sum(kv.bytes // kv.pages for kv in caches)
    if host_bytes and (windows or not pages):
        needs = "no layers with a window" if windows else "room for a page"
        raise ValueError(f"Engine: host_bytes is {host_bytes}, expected 0, or {needs}")
    for kv in caches:
        kv.add_host(pages)
    return WatchedPool(pool, moves, pages, events), moves
