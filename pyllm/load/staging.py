"""Tensors of a checkpoint on a device: bytes go from the file, by several threads at a time, into a ring of pinned buffers, and on.

The host holds the ring alone (96 MiB), however large a tensor or a file is, and the reads
into one buffer overlap with the copies out of the others. Nothing of the file is touched through its mapping, so that a file that shrinks
meanwhile is an error and no signal.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from .reader import FileReader
from .tensors import TensorMap

if TYPE_CHECKING:
    from .mapped import MappedFile

CHUNK = 32 << 20  # read in 0.6 ms: long against what waking the threads and issuing a copy take
SLOTS = 3
THREADS = 16  # with 8 an H200 got 28 GB/s, with 16 38


class Stager:
    """The ring and the threads that fill it, for one device."""

    def __init__(self, device: torch.device, threads: int | None = None, chunk: int = CHUNK, slots: int = SLOTS) -> None:
        self.device, self.chunk = device, chunk
        self.threads = threads or min(THREADS, len(os.sched_getaffinity(0)))
        self._reader = FileReader(self.threads)
        buffers = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(slots if device.type == "cuda" else 0)]
        self._ring = cycle([(buffer, buffer.numpy().data, torch.cuda.Event()) for buffer in buffers])

    def into(self, file: MappedFile, begin: int, out: torch.Tensor) -> None:
        """The bytes of the file from `begin` on into `out`, a flat uint8 tensor of host memory, pinned or not."""
        file.read_by(self._reader, begin, out.numpy().data)

    def bytes(self, file: MappedFile, begin: int, size: int) -> torch.Tensor:
        """`size` bytes of the file on the device. On a GPU: as of the current stream, like any kernel's result."""
        out = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            self.into(file, begin, out)
            return out
        for part, (buffer, view, copied) in zip(out.split(self.chunk), self._ring, strict=False):
            copied.synchronize()  # the copy out of this buffer that was issued last time
            n = len(part)
            file.read_by(self._reader, begin, view[:n])
            part.copy_(buffer[:n], non_blocking=True)
            copied.record(torch.cuda.current_stream(self.device))
            begin += n
        return out


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


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device | str) -> Mapping[str, torch.Tensor]:
    """What a model bound on `device` reads: for a GPU the tensors of a checkpoint come through a ring of pinned buffers, everything else
    (a CPU, a mapping of the caller's own) is as it is."""
    staged = isinstance(tensors, TensorMap) and torch.device(device).type == "cuda"
    return OnDevice(tensors, device) if staged and isinstance(tensors, TensorMap) else tensors
