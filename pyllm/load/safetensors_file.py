"""safetensors, read by our own checks: one file, or the shards that an index names.

Layout: u64 little-endian header length n, n bytes of JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}}, then the data that
the offsets count from. The tensors must tile the data exactly: no hole, no overlap, no trailing byte, so that nothing can hide in a file
and no two readers can see different tensors. Everything is checked before the first tensor is touched, and tensors are views of the map.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .confine import confined
from .errors import CheckpointError, show
from .jsonfile import parse_json_object, read_json_object
from .mapped import MappedFile
from .staging import Stager
from .tensors import TensorMap

# JSON grows about 20x as Python objects: 32 MiB of header (300 000 tensors of usual names, never more than 650 000) stays under a
# gigabyte whatever it says.
MAX_HEADER = 32 << 20
MAX_NAME = 512
MAX_RANK = 8
MAX_INDEX = 32 << 20  # for the same reason; DeepSeek V3's, of 91 000 tensors, has 9 MB
MAX_SHARDS = 10_000
METADATA = "__metadata__"
INDEX_NAME = "model.safetensors.index.json"

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `begin` and `end` count from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(where: str, fields: Any, data_begin: int, data_len: int) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        got = sorted(fields) if isinstance(fields, dict) else fields
        raise CheckpointError(f"{where}: expected the fields data_offsets, dtype, shape, got {show(got)}")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: dtype {show(fields['dtype'])} is not one of {' '.join(DTYPES)}")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_size(d) for d in shape):
        raise CheckpointError(f"{where}: shape {show(shape)} is not a list of at most {MAX_RANK} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(o) for o in offsets):
        raise CheckpointError(f"{where}: data_offsets {show(offsets)} is not a list of two positions")
    begin, end = offsets
    if not begin <= end <= data_len:
        raise CheckpointError(f"{where}: data_offsets {show(offsets)} are outside the {data_len} bytes of data")
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    if nbytes != end - begin:
        raise CheckpointError(f"{where}: {show(shape)} of {fields['dtype']} is {show(nbytes)} bytes, data_offsets span {end - begin}")
    return Entry(dtype, tuple(shape), data_begin + begin, data_begin + end)


def _check_tiling(path: Path, entries: Mapping[str, Entry], data_begin: int, file_size: int) -> None:
    at = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps the tensor before it" if entry.begin < at else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {show(name)}: data_offsets begin at {entry.begin - data_begin}: it {what}")
        at = entry.end
    if at != file_size:
        raise CheckpointError(f"{path}: {file_size - at} bytes after the last tensor belong to no tensor")


def _parse_header(file: MappedFile) -> tuple[dict[str, Entry], dict[str, str]]:
    path = file.path
    if file.size < 10:
        raise CheckpointError(f"{path}: {file.size} bytes are too few for a safetensors header")
    (length,) = struct.unpack("<Q", file.bytes(0, 8))
    if not 2 <= length <= min(MAX_HEADER, file.size - 8):
        raise CheckpointError(f"{path}: header length {length} is not within 2..{min(MAX_HEADER, file.size - 8)}")
    header = file.bytes(8, 8 + length)
    if header[:1] != b"{":
        raise CheckpointError(f"{path}: header: starts with {show(header[:1])}, expected '{{'")
    fields = parse_json_object(header, f"{path}: header", max_depth=3)
    metadata = fields.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: {METADATA}: expected an object of strings")
    data_begin = 8 + length
    entries: dict[str, Entry] = {}
    for name, value in fields.items():
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise CheckpointError(f"{path}: tensor name {show(name)} is not 1..{MAX_NAME} printable characters")
        entries[name] = _entry(f"{path}: tensor {show(name)}", value, data_begin, file.size - data_begin)
    _check_tiling(path, entries, data_begin, file.size)
    return entries, metadata


class SafetensorsFile(TensorMap):
    """One `.safetensors` file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path)
        self._entries, self.metadata = _parse_header(self._file)

    def names(self) -> Mapping[str, Entry]:
        return self._entries

    def _find(self, name: str) -> Entry:
        if name not in self._entries:
            raise KeyError(f"{self.path}: no tensor {show(name)}")
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._find(name).dtype

    def read(self, name: str, stager: Stager | None = None) -> torch.Tensor:
        entry = self._find(name)
        if entry.dtype is torch.bool:  # a stored byte may be neither 0 nor 1, which torch.bool must never hold
            return self._file.tensor(entry.begin, entry.shape, torch.uint8, stager) != 0
        return self._file.tensor(entry.begin, entry.shape, entry.dtype, stager)


class ShardedSafetensors(TensorMap):
    """The shards that a `model.safetensors.index.json` names; index and shards must list the same tensors."""

    def __init__(self, index_path: str | Path) -> None:
        self.path = Path(index_path)
        index = read_json_object(self.path, MAX_INDEX, max_depth=4)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{self.path}: weight_map: expected an object of tensor name to file name")
        files = sorted(set(weight_map.values()))
        if not 0 < len(files) <= MAX_SHARDS:
            raise CheckpointError(f"{self.path}: weight_map: names {len(files)} files, expected 1..{MAX_SHARDS}")
        for name in files:
            if not name.endswith(".safetensors"):
                raise CheckpointError(f"{self.path}: weight_map: {show(name)} is not a .safetensors file")
        paths = {name: confined(self.path.parent, name, f"{self.path}: weight_map") for name in files}
        self._shards = {name: SafetensorsFile(path) for name, path in paths.items()}
        self._where: dict[str, str] = weight_map
        self._check_agreement()

    def _check_agreement(self) -> None:
        for tensor, file in self._where.items():
            if tensor not in self._shards[file]:
                raise CheckpointError(f"{self.path}: weight_map: tensor {show(tensor)} is not in {file}")
        for file, shard in self._shards.items():
            for tensor in shard:
                if self._where.get(tensor) != file:
                    listed = "is not listed" if tensor not in self._where else f"is listed in {self._where[tensor]}"
                    raise CheckpointError(f"{self.path}: weight_map: tensor {show(tensor)} of {file} {listed}")

    def names(self) -> Mapping[str, str]:
        return self._where

    def _shard(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise KeyError(f"{self.path}: no tensor {show(name)}")
        return self._shards[self._where[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shard(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._shard(name).dtype(name)

    def read(self, name: str, stager: Stager | None = None) -> torch.Tensor:
        return self._shard(name).read(name, stager)


def open_safetensors(directory: str | Path) -> TensorMap:
    """The weights of a model directory: `model.safetensors.index.json` and its shards, or the one `.safetensors` file."""
    root = Path(directory)
    singles = sorted(p.name for p in root.iterdir() if p.name.endswith(".safetensors"))
    index = root / INDEX_NAME
    if index.exists():
        if "model.safetensors" in singles:
            raise CheckpointError(f"{root}: has both model.safetensors and {INDEX_NAME}: remove the one that is not meant")
        return ShardedSafetensors(index)
    if "model.safetensors" in singles:
        singles = ["model.safetensors"]
    if len(singles) == 1:
        return SafetensorsFile(confined(root, singles[0], str(root)))
    if singles:
        raise CheckpointError(f"{root}: {len(singles)} .safetensors files but no {INDEX_NAME} that says which tensors are where")
    other = sorted(p.name for p in root.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".npz", ".ckpt"})
    hint = f"; {show(other[0])} may hold code (pickle) and is never read: convert it to safetensors" if other else ""
    raise CheckpointError(f"{root}: no .safetensors file{hint}")
