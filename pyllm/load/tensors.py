"""The lazy mapping from tensor names to tensors that every loader offers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .staging import Stager


class TensorMap(Mapping[str, torch.Tensor]):
    """Names to tensors, read on access: `keys()`, `name in`, `[name]`, and `shape(name)`, `dtype(name)` without reading."""

    def names(self) -> Mapping[str, object]:
        """What `keys()`, `in` and `len` look at: a dict whose keys are the tensor names."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        raise NotImplementedError

    def dtype(self, name: str) -> torch.dtype:
        raise NotImplementedError

    def read(self, name: str, stager: Stager | None = None) -> torch.Tensor:
        """`self[name]`, on the stager's device and with none of it left in the mapping of the file."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())
