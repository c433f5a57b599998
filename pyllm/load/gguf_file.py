"""GGUF versions 2 and 3, little-endian: metadata and tensors of one file, every count and offset checked before it is believed.

Layout: "GGUF", u32 version, u64 tensors, u64 keys; then key string, u32 type, value for each key; then name, u32 rank, u64 sizes (the
fastest first), u32 type, u64 offset for each tensor; then padding to `general.alignment`, where the offsets count from.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .errors import CheckpointError, show
from .gguf_types import CHUNK, TYPES, GgufType
from .mapped import MappedFile
from .staging import Stager
from .tensors import TensorMap

MAX_TENSORS = 100_000
MAX_KEYS = 10_000
MAX_STRING = 16 << 20
MAX_NAME = 512
MAX_ARRAY = 1 << 22  # four million: more than twenty times the largest vocabulary in use
MAX_ELEMENTS = 1 << 24  # over all arrays: Python strings cost 50 bytes each however short they are in the file
MAX_RANK = 4
MAX_SIZE = 1 << 40
MAX_ALIGNMENT = 1 << 20

# Metadata value types: struct format and numpy dtype of the scalars; 7 is bool, 8 a string, 9 an array.
SCALARS: dict[int, str] = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|u1", 10: "<u8", 11: "<i8", 12: "<f8"}
U32, BOOL, STRING, ARRAY = 4, 7, 8, 9


class _Reader:
    """A cursor over the header that never moves past the end of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.at = 0
        self.elements = 0
        self._view = memoryview(file.view).toreadonly()

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {what}")

    def take(self, nbytes: int, field: str) -> memoryview:
        if nbytes > self.file.size - self.at:
            left = self.file.size - self.at
            raise self.fail(f"{field}: needs {nbytes} bytes at byte {self.at}, where the file has only {left} left")
        self.at += nbytes
        return self._view[self.at - nbytes : self.at]

    def u32(self, field: str) -> int:
        return int(struct.unpack("<I", self.take(4, field))[0])

    def u64(self, field: str) -> int:
        return int(struct.unpack("<Q", self.take(8, field))[0])

    def string(self, field: str, limit: int = MAX_STRING) -> str:
        length = self.u64(field)
        if length > limit:
            raise self.fail(f"{field}: a string of {length} bytes, more than {limit}")
        try:
            return str(self.take(length, field), "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{field}: not UTF-8 at byte {error.start}") from None

    def scalar(self, kind: int, field: str) -> int | float | bool:
        value: int | float = np.frombuffer(self.take(np.dtype(SCALARS[kind]).itemsize, field), SCALARS[kind])[0].item()
        if kind == BOOL:
            if value not in (0, 1):
                raise self.fail(f"{field}: {value} is not a bool")
            return bool(value)
        return value

    def array(self, field: str) -> list[str] | np.ndarray[Any, Any]:
        kind, count = self.u32(field), self.u64(field)
        self.elements += count
        if count > MAX_ARRAY or self.elements > MAX_ELEMENTS:
            raise self.fail(f"{field}: an array of {count}, more than {MAX_ARRAY} (or {MAX_ELEMENTS} over all arrays)")
        if kind == STRING:
            if count * 8 > self.file.size - self.at:  # each string has a u64 length: refuse before the list grows
                raise self.fail(f"{field}: {count} strings do not fit the {self.file.size - self.at} bytes that are left")
            return [self.string(field) for _ in range(count)]
        if kind == ARRAY:
            raise self.fail(f"{field}: arrays of arrays are not supported")
        if kind not in SCALARS:
            raise self.fail(f"{field}: unknown array element type {kind}")
        values: np.ndarray[Any, Any] = np.frombuffer(self.take(count * np.dtype(SCALARS[kind]).itemsize, field), SCALARS[kind]).copy()
        return values.astype(bool) if kind == BOOL else values

    def value(self, kind: int, field: str) -> Any:
        if kind == STRING:
            return self.string(field)
        if kind == ARRAY:
            return self.array(field)
        if kind not in SCALARS:
            raise self.fail(f"{field}: unknown value type {kind}")
        return self.scalar(kind, field)


@dataclass(frozen=True)
class Info:
    """One tensor: row-major shape (the slowest size first), block type, byte range within the file."""

    shape: tuple[int, ...]
    type: GgufType
    begin: int
    nbytes: int


def _header(r: _Reader) -> tuple[int, int]:
    magic = bytes(r.take(4, "magic"))
    if magic != b"GGUF":
        raise r.fail(f"magic: expected b'GGUF', got {show(magic)}")
    version = r.u32("version")
    if version not in (2, 3):
        note = " (a big-endian file)" if version in (2 << 24, 3 << 24) else ""
        raise r.fail(f"version: {version} is not supported, only 2 and 3{note}")
    tensors, keys = r.u64("tensor count"), r.u64("key count")
    # The shortest tensor entry is 8 + 1 + 4 + 8 + 4 + 8 bytes, the shortest key 8 + 1 + 4 + 1.
    if tensors > MAX_TENSORS or tensors * 33 > r.file.size - r.at:
        raise r.fail(f"tensor count: {tensors} is more than {MAX_TENSORS} or than the file can hold")
    if keys > MAX_KEYS or keys * 14 > r.file.size - r.at:
        raise r.fail(f"key count: {keys} is more than {MAX_KEYS} or than the file can hold")
    return tensors, keys


def _metadata(r: _Reader, keys: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for i in range(keys):
        key = r.string(f"key {i}", MAX_NAME)
        if not key or not key.isprintable():
            raise r.fail(f"key {i}: {show(key)} is not a printable name")
        if key in result:
            raise r.fail(f"key {show(key)} appears twice")
        kind = r.u32(f"key {show(key)}")
        if key == "general.alignment" and kind != U32:  # other readers refuse it or take the default: no two may see different tensors
            raise r.fail(f"key 'general.alignment': type {kind}, expected {U32} (u32)")
        result[key] = r.value(kind, f"key {show(key)}")
    return result


def _tensor_info(r: _Reader, i: int) -> tuple[str, Info]:
    name = r.string(f"tensor {i} name", MAX_NAME)
    field = f"tensor {show(name)}"
    if not name or not name.isprintable():
        raise r.fail(f"tensor {i}: name {show(name)} is not printable")
    rank = r.u32(f"{field} rank")
    if not 1 <= rank <= MAX_RANK:
        raise r.fail(f"{field}: rank {rank} is not within 1..{MAX_RANK}")
    sizes = [r.u64(f"{field} size {d}") for d in range(rank)]
    kind, offset = r.u32(f"{field} type"), r.u64(f"{field} offset")
    if not all(1 <= size <= MAX_SIZE for size in sizes) or math.prod(sizes) > MAX_SIZE:
        raise r.fail(f"{field}: sizes {show(sizes)} are not within 1..{MAX_SIZE}")
    if kind not in TYPES:
        raise r.fail(f"{field}: unknown tensor type {kind}")
    block = TYPES[kind]
    if sizes[0] % block.values:
        raise r.fail(f"{field}: rows of {sizes[0]} are not whole {block.name} blocks of {block.values}")
    return name, Info(tuple(reversed(sizes)), block, offset, math.prod(sizes) // block.values * block.nbytes)


def _place(r: _Reader, infos: dict[str, Info], alignment: int) -> dict[str, Info]:
    """Offsets become positions in the file; aligned, inside the file, apart from each other."""
    start = -(-r.at // alignment) * alignment
    placed: dict[str, Info] = {}
    end = start
    last = ""
    for name, info in sorted(infos.items(), key=lambda item: item[1].begin):
        field = f"tensor {show(name)}"
        if info.begin % alignment:
            raise r.fail(f"{field}: offset {info.begin} is not a multiple of the alignment {alignment}")
        begin = start + info.begin
        if begin + info.nbytes > r.file.size:
            raise r.fail(f"{field}: bytes {begin}..{begin + info.nbytes} are outside the file of {r.file.size} bytes")
        if begin < end:
            raise r.fail(f"{field}: offset {info.begin} overlaps tensor {show(last)}")
        placed[name] = Info(info.shape, info.type, begin, info.nbytes)
        end, last = begin + info.nbytes, name
    return {name: placed[name] for name in infos}


class GgufFile(TensorMap):
    """One `.gguf` file: `.metadata` (strings, numbers, lists of strings, numpy arrays) and tensors by their GGUF names."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path)
        r = _Reader(self._file)
        tensors, keys = _header(r)
        self.metadata = _metadata(r, keys)
        infos: dict[str, Info] = {}
        for i in range(tensors):
            name, info = _tensor_info(r, i)
            if name in infos:
                raise r.fail(f"tensor {show(name)} appears twice")
            infos[name] = info
        alignment = self.metadata.get("general.alignment", 32)
        if not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise r.fail(f"key 'general.alignment': {show(alignment)} is not a power of 2 within 8..{MAX_ALIGNMENT}")
        self._infos = _place(r, infos, alignment)
        self.alignment, self.header_end, self.size = alignment, r.at, self._file.size

    def files(self) -> list[GgufFile]:
        """The files that the tensors are in: this one (see gguf_shards.py)."""
        return [self]

    def gaps(self) -> int:
        """Bytes before and between the tensors beyond what the alignment asks for: nothing reads them."""
        hidden, at = 0, self.header_end
        for info in sorted(self._infos.values(), key=lambda info: info.begin):
            hidden += max(info.begin - -(-at // self.alignment) * self.alignment, 0)
            at = info.begin + info.nbytes
        return hidden

    def names(self) -> Mapping[str, Info]:
        return self._infos

    def info(self, name: str) -> Info:
        if name not in self._infos:
            raise KeyError(f"{self.path}: no tensor {show(name)}")
        return self._infos[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        info = self.info(name)
        if info.type.dtype is None:
            readable = " ".join(t.name for t in TYPES.values() if t.dtype is not None)
            raise CheckpointError(f"{self.path}: tensor {show(name)}: type {info.type.name} is not supported, only {readable}")
        return info.type.dtype

    def read(self, name: str, stager: Stager | None = None) -> torch.Tensor:
        """The numbers: a view of the file for plain types, decoded to fp32 (on the stager's device) for block types."""
        return self._read(name, self.info(name).shape, 0, stager)

    def part(self, name: str, index: int, stager: Stager | None = None) -> torch.Tensor:
        """`self[name][index]` without decoding the rest: one expert of a stack."""
        shape = self.info(name).shape
        if not (len(shape) > 1 and 0 <= index < shape[0]):
            raise IndexError(f"{self.path}: tensor {show(name)}: no part {index} in shape {shape}")
        return self._read(name, shape[1:], index, stager)

    def _read(self, name: str, shape: tuple[int, ...], index: int, stager: Stager | None) -> torch.Tensor:
        """`shape` of numbers, `index` times as many behind the start of the tensor. Rows are whole blocks, so every part of rows is."""
        info, dtype = self.info(name), self.dtype(name)
        block, decode = info.type, info.type.decode
        count = math.prod(shape) // block.values
        begin = info.begin + index * count * block.nbytes
        if decode is None:
            return self._file.tensor(begin, shape, dtype, stager)
        raw = self._file.tensor(begin, (count, block.nbytes), torch.uint8, stager)
        step = CHUNK.get(raw.device.type, CHUNK["cpu"]) // block.values
        if count <= step:
            return decode(raw).view(shape)
        numbers = torch.empty(count, block.values, dtype=dtype, device=raw.device)
        for at in range(0, count, step):
            numbers[at : at + step] = decode(raw[at : at + step])
        return numbers.view(shape)
