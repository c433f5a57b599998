"""A read-only model file in memory, and tensors that view it without a copy.

The mapping is private (copy on write): a caller that writes into a tensor changes its own pages, never the file.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch

from .errors import CheckpointError
from .jsonfile import open_regular


class MappedFile:
    """`bytes(begin, end)` and `tensor(...)` over a memory-mapped file; every range is checked against the size at opening."""

    def __init__(self, path: Path) -> None:
        self.path = path
        handle, self.size = open_regular(path)
        with handle:
            if self.size == 0:
                raise CheckpointError(f"{path}: the file is empty")
            self._map = mmap.mmap(handle.fileno(), self.size, access=mmap.ACCESS_COPY)
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
        return bytes(self.view[begin:end])

    def tensor(self, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the file's own pages; a copy only where the offset is not a multiple of the element size."""
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        self._check(begin, begin + nbytes)
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if begin % dtype.itemsize == 0:
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin).view(shape)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=begin).clone().view(dtype).view(shape)
