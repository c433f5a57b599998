"""Small model files made byte by byte, so that a test can get any field wrong."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q", 11: "<q", 12: "<d"}

# The values -16..15, quantized: bytes and, for the two 4-bit types, what they decode to.
Q4_0_BLOCK = bytes.fromhex("0040809191a2a2b3b3c4c4d5d5e6e6f7f7f8")
Q4_1_BLOCK = bytes.fromhex("224000cc80809191a2a2b3b3c4c4d5d5e6e6f7f7")
Q8_0_BLOCK = bytes.fromhex("083081899199a1a9b1b9c0c8d0d8e0e8f0f8000810182028303840474f575f676f77")


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, v: Any) -> bytes:
    return struct.pack("<I", kind) + (string(v) if kind == STRING else struct.pack(FORMATS[kind], v))


def array(kind: int, items: Iterable[Any]) -> bytes:
    items = list(items)
    body = b"".join(string(v) if kind == STRING else struct.pack(FORMATS[kind], v) for v in items)
    return struct.pack("<IIQ", ARRAY, kind, len(items)) + body


def info(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    """`sizes` as the file has them: the fastest first."""
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def gguf(
    keys: Iterable[tuple[str, bytes]] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    keys, tensors = list(keys), list(tensors)
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)
    head += b"".join(string(k) + v for k, v in keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def safetensors(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path
