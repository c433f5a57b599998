"""FileReader: the compiled one where `pyllm._runtime` was built, else its Python twin."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

SMALL = 256 << 10  # read by the caller alone: waking a thread takes as long
MOST = 2 << 20  # of a piece: small enough that all threads end together


class PythonFileReader:
    """Reads a range of a file by several threads at a time; the caller is one of them."""

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= 256:
            raise ValueError(f"FileReader: threads is {threads}, expected 1 to 256")
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="pyllm-load")

    def read(self, descriptor: int, begin: int, out: memoryview) -> int:
        """Fills `out` with the bytes from `begin` on. Returns how many there are: fewer, some unread, where the file ends before."""
        size, ends = len(out), [len(out)]
        piece = min(max(-(-size // self._threads), SMALL), MOST)
        turn = itertools.count()  # one C call for the next number: threads never get the same

        def work() -> None:
            for i in turn:
                at, last = i * piece, min((i + 1) * piece, size)
                if at >= size:
                    return
                while at < last:
                    got = os.preadv(descriptor, [out[at:last]], begin + at)
                    if got == 0:
                        ends.append(at)
                        return
                    at += got

        jobs = [self._pool.submit(work) for _ in range(min(self._threads, -(-size // piece)) - 1)]
        work()
        for job in jobs:
            job.result()
        return min(ends)


if TYPE_CHECKING:
    FileReader = PythonFileReader
else:
    try:
        from pyllm._runtime import FileReader
    except ModuleNotFoundError:
        FileReader = PythonFileReader
