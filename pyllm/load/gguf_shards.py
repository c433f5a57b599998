"""A GGUF model in several files, `name-00001-of-00003.gguf` and so on: the first one holds the metadata, every one some of the tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .confine import confined
from .errors import CheckpointError, show
from .gguf_file import GgufFile, Info
from .safetensors_file import MAX_SHARDS
from .staging import Stager


class GgufShards(GgufFile):
    """All files of one model behind the face of one; each is checked as a file of its own, and that they belong together."""

    def __init__(self, first: GgufFile, paths: list[Path]) -> None:
        self.path, self.metadata, self.alignment, self.header_end = first.path, first.metadata, first.alignment, first.header_end
        self._files = [first, *(GgufFile(path) for path in paths[1:])]
        self.size = sum(file.size for file in self._files)
        self._where: dict[str, GgufFile] = {}
        for number, file in enumerate(self._files):
            _check_place(file, number, len(paths))
            for name in file:
                if name in self._where:
                    raise CheckpointError(f"{file.path}: tensor {show(name)} is also in {self._where[name].path.name}")
                self._where[name] = file
        total = first.metadata.get("split.tensors.count", len(self._where))
        if type(total) is not int or total != len(self._where):
            raise CheckpointError(f"{self.path}: key 'split.tensors.count' is {show(total)}, but the files hold {len(self._where)} tensors")

    def files(self) -> list[GgufFile]:
        return self._files

    def names(self) -> Mapping[str, Any]:
        return self._where

    def _file_of(self, name: str) -> GgufFile:
        if name not in self._where:
            raise KeyError(f"{self.path}: no tensor {show(name)}")
        return self._where[name]

    def info(self, name: str) -> Info:
        return self._file_of(name).info(name)

    def read(self, name: str, stager: Stager | None = None) -> torch.Tensor:
        return self._file_of(name).read(name, stager)

    def part(self, name: str, index: int, stager: Stager | None = None) -> torch.Tensor:
        return self._file_of(name).part(name, index, stager)


def _check_place(file: GgufFile, number: int, count: int) -> None:
    for key, want in (("split.no", number), ("split.count", count)):
        found = file.metadata.get(key)
        if type(found) is not int or found != want:  # an array has no truth of its own
            raise CheckpointError(f"{file.path}: key '{key}' is {show(found)}, expected {want}")


def open_gguf(path: str | Path) -> GgufFile:
    """One file, or, where its `split.count` says that it is the first of several, all of them."""
    first = GgufFile(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is int and count in (0, 1):
        return first
    found = re.fullmatch(r"(.+)-00001-of-(\d{5})\.gguf", first.path.name, re.ASCII)
    if type(count) is not int or not 0 < count <= MAX_SHARDS or found is None or int(found[2]) != count:
        wanted = f"the first file of {show(count)}, named ...-00001-of-{count:05d}.gguf" if type(count) is int else "a number of files"
        raise CheckpointError(f"{first.path}: key 'split.count' is {show(count)}: expected {wanted}")
    names = [f"{found[1]}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    return GgufShards(first, [confined(first.path.parent, name, str(first.path)) for name in names])
