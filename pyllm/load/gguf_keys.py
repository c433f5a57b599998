"""Typed reads of a GGUF file's `<arch>.*` metadata."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .errors import CheckpointError, show
from .gguf_file import GgufFile

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
MAX_EXPERTS = 4096
MAX_CONTEXT = 1 << 30


def shortest(value: float) -> float:
    """1e-05, where the file's fp32 reads as 9.999999747378752e-06: the number that its writer had."""
    short = float(str(np.float32(value)))
    return short if np.float32(value) == value else float(value)


class Keys:
    """Reads that remember what was read, so that a key nobody understood is an error."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self.arch = file, arch
        self.read: set[str] = set()

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: key '{self.arch}.{key}' {what}")

    def get(self, key: str) -> Any:
        self.read.add(key)
        return self.file.metadata.get(f"{self.arch}.{key}")

    def size(self, key: str, limit: int, default: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value <= limit:
            raise self.fail(key, "is missing" if value is None else f"is {show(value)}, expected an integer within {least}..{limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "is missing" if value is None else f"is {show(value)}, expected a positive number")
        return shortest(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fail(key, f"is {show(value)}, expected a bool")
        return value

    def check_all_read(self) -> None:
        for key, value in self.file.metadata.items():
            name = key.removeprefix(f"{self.arch}.")
            if name != key and name not in self.read and not (isinstance(value, (int, float, str)) and not value):
                raise self.fail(name, f"is {show(value)}, which is not supported")
