"""A read-only model file in memory, and tensors that view it without a copy.

`bytes` and `read_into` read the file itself (pread), `tensor` maps it. The mapping is private (copy on write): a caller that writes into
a tensor changes its own pages, never the file.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .errors import CheckpointError
from .jsonfile import open_regular

if TYPE_CHECKING:
    from .reader import FileReader
    from .staging import Stager


NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; without it a file larger than the host's memory cannot be mapped writable


class MappedFile:
    """`bytes(begin, end)` and `tensor(...)` over a memory-mapped file; every range is checked against the size at opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        handle, self.size = open_regular(path)
        with handle:
            if self.size == 0:
                raise CheckpointError(f"{path}: the file is empty")
            try:
                self._map = mmap.mmap(handle.fileno(), self.size, flags=mmap.MAP_PRIVATE | NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CheckpointError(f"{path}: {self.size} bytes cannot be mapped: {reason}") from None
            self._descriptor = os.dup(handle.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self.view = memoryview(self._map)

    def _check(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= self.size:
            raise CheckpointError(f"{self.path}: bytes {begin}..{end} are outside the file of {self.size} bytes")
        # Pages past the end of a file that shrank raise SIGBUS, which no handler turns into an error: look first.
        size = self._map.size()
        if size < self.size:
            raise CheckpointError(f"{self.path}: the file shrank from {self.size} to {size} bytes after it was opened")

    def bytes(self, begin: int, end: int) -> bytes:
        self._check(begin, end)
        out = bytearray(end - begin)
        self.read_into(begin, memoryview(out))
        return bytes(out)

    def read_into(self, begin: int, out: memoryview) -> None:
        """Fill `out` with the file's bytes from `begin` on."""
        self._check(begin, begin + len(out))
        while out:
            got = os.preadv(self._descriptor, [out], begin)
            if got == 0:
                raise CheckpointError(f"{self.path}: the file ended at byte {begin} while it was read")
            begin, out = begin + got, out[got:]

    def read_by(self, reader: FileReader, begin: int, out: memoryview) -> None:
        """The same by the threads of a reader."""
        self._check(begin, begin + len(out))
        got = reader.read(self._descriptor, begin, out)
        if got < len(out):
            raise CheckpointError(f"{self.path}: the file ended at byte {begin + got} while it was read")

    def tensor(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype, stager: Stager | None = None) -> torch.Tensor:
        """A tensor over the file's own pages; a copy only where the offset is not a multiple of the element size.

        With a stager: a copy on its device, whose pages are read and not mapped."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        self._check(begin, begin + nbytes)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device=None if stager is None else stager.device)
        if stager is not None:
            return stager.bytes(self, begin, nbytes).view(dtype).view(shape)
        if begin % dtype.itemsize == 0:
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin).view(shape)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=begin).clone().view(dtype).view(shape)
