"""Bounded reading of files and of JSON: sizes before bytes, unique keys, limited depth, no NaN, nothing but regular files."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from .errors import CheckpointError, show


def open_regular(path: Path) -> tuple[BinaryIO, int]:
    """Open a regular file and return it with its size. O_NONBLOCK: opening a FIFO by mistake must not hang."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: cannot be opened: {reason}") from None
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file")
    return os.fdopen(descriptor, "rb"), info.st_size


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The bytes of a small file, refused by its size before anything is read."""
    handle, size = open_regular(path)
    with handle:
        if size > max_bytes:
            raise CheckpointError(f"{path}: {size} bytes, more than the {max_bytes} allowed for this file")
        return handle.read(max_bytes)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CheckpointError(f"key {show(key)} appears twice")
            seen.add(key)
    return result


def _no_constant(name: str) -> Any:
    raise CheckpointError(f"{name} is not JSON")


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child for item in level for child in (item.values() if isinstance(item, dict) else item) if isinstance(child, (dict, list))
        ]
    return depth


def parse_json_object(data: bytes, where: str, max_depth: int) -> dict[str, Any]:
    """Parse a JSON object strictly: UTF-8, unique keys at every level, no NaN or Infinity, at most `max_depth` nested containers."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise CheckpointError(f"{where}: JSON is nested deeper than {max_depth}") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(value).__name__}")
    if _depth(value) > max_depth:
        raise CheckpointError(f"{where}: JSON is nested deeper than {max_depth}")
    return value


def read_json_object(path: Path, max_bytes: int, max_depth: int = 32) -> dict[str, Any]:
    """Read and strictly parse a JSON object file."""
    return parse_json_object(read_bytes(path, max_bytes), str(path), max_depth)
