"""Tensors of a checkpoint on a device: bytes go from the file by several `pread` at a time into a ring of pinned buffers, and on.

The host holds the ring alone (48 MiB, so that it stays in a server's last cache), however large a tensor or a file is, and the reads of
one tensor overlap with the copies of the one before it. Nothing of the file is touched through its mapping, so that a file that shrinks
meanwhile is an error and no signal.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from .tensors import TensorMap

if TYPE_CHECKING:
    from .mapped import MappedFile

CHUNK = 4 << 20  # a read of this size takes about 1 ms from the page cache: long against what issuing a copy takes (10 us)
SLOTS = 12
THREADS = 8
SMALL = 256 << 10  # below this one read is as fast as many


class Stager:
    """The ring and its threads for one device."""

    def __init__(self, device: torch.device, threads: int | None = None, chunk: int = CHUNK, slots: int = SLOTS) -> None:
        self.device, self.chunk = device, chunk
        self.threads = threads or min(THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(max(self.threads - 1, 1), thread_name_prefix="pyllm-load")
        self._free: queue.SimpleQueue[tuple[torch.Tensor, memoryview, Any]] = queue.SimpleQueue()
        cuda = device.type == "cuda"
        for _ in range(slots if cuda else 0):
            buffer = torch.empty(chunk, dtype=torch.uint8, pin_memory=True)
            self._free.put((buffer, buffer.numpy().data, torch.cuda.Event()))

    def pieces(self, size: int) -> Iterator[tuple[int, int]]:
        """(offset, length) of reads: as many for each thread, so that all end together (15 reads for 8 threads take as long as 16)."""
        turns = max(-(-size // (self.threads * self.chunk)), 1)
        step = max(-(-size // (self.threads * turns)), SMALL)
        return ((at, min(step, size - at)) for at in range(0, size, step))

    def into(self, file: MappedFile, begin: int, out: torch.Tensor) -> None:
        """The bytes of the file from `begin` on into `out`, a flat uint8 tensor of host memory, pinned or not."""
        view = out.numpy().data
        self._spread(lambda at, n: file.read_into(begin + at, view[at : at + n]), len(view))

    def _spread(self, run: Callable[[int, int], None], size: int, stream: torch.cuda.Stream | None = None) -> None:
        """`run` for every piece, by the caller and as many others as there are pieces for; a small tensor wakes no thread."""
        pieces = list(self.pieces(size))

        def work() -> None:
            with torch.cuda.stream(stream):  # nothing, if there is none
                while pieces:
                    try:
                        at, n = pieces.pop()
                    except IndexError:  # another thread took the last one
                        return
                    run(at, n)

        jobs = [self._pool.submit(work) for _ in range(min(self.threads, len(pieces)) - 1)]
        work()
        for job in jobs:
            job.result()

    def bytes(self, file: MappedFile, begin: int, size: int) -> torch.Tensor:
        """`size` bytes of the file on the device. On a GPU: as of the current stream, like any kernel's result."""
        out = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            self.into(file, begin, out)
            return out
        stream = torch.cuda.current_stream(self.device)

        def move(at: int, n: int) -> None:
            buffer, view, copied = slot = self._free.get()
            try:
                copied.synchronize()  # the copy out of this buffer that was issued last time
                file.read_into(begin + at, view[:n])
                out[at : at + n].copy_(buffer[:n], non_blocking=True)
                copied.record(stream)
            finally:
                self._free.put(slot)

        self._spread(move, size, stream)
        return out

    def close(self) -> None:
        self._pool.shutdown()


class OnDevice(TensorMap):
    """The same tensors, made on the device: read through the ring, blocks decoded there."""

    def __init__(self, tensors: TensorMap, device: torch.device | str, threads: int | None = None) -> None:
        self.tensors = tensors
        self.stager = Stager(torch.device(device), threads)
        self._last: tuple[str, torch.Tensor] | None = None

    def names(self) -> Mapping[str, object]:
        return self.tensors.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The last one is kept: several parts of a model may be rows of one tensor, one after the other."""
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self.tensors.read(name, self.stager)
        return self._last[1]

    def close(self) -> None:
        """The ring's memory and threads, and the tensor that was kept, are given back."""
        self._last = None
        self.stager.close()


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device | str) -> Mapping[str, torch.Tensor]:
    """What a model bound on `device` reads: for a GPU the tensors of a checkpoint come through a ring of pinned buffers, everything else
    (a CPU, a mapping of the caller's own) is as it is."""
    staged = isinstance(tensors, TensorMap) and torch.device(device).type == "cuda"
    return OnDevice(tensors, device) if staged and isinstance(tensors, TensorMap) else tensors
