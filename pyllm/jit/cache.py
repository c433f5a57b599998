"""Compiled code on disk: one file per digest in a directory that only this user can enter. Code from a place that others can write to is
never loaded; a directory that cannot be used costs a warning and a compilation per process, no more."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SUM = 32  # bytes of SHA-256 ahead of the code
_directory: list[Path | None] = []


def use_cache(directory: Path | str | None) -> None:
    """Keep compiled variants there instead of in ~/.cache/pyllm/jit; None: keep them in memory alone."""
    _directory[:] = [None if directory is None else Path(directory)]


def directory() -> Path | None:
    if not _directory:
        try:
            use_cache(Path.home() / ".cache" / "pyllm" / "jit")
        except RuntimeError as error:  # a user without a home
            warnings.warn(f"pyllm.jit: {error}; compiled variants are not kept", RuntimeWarning, stacklevel=2)
            use_cache(None)
    return _directory[0]


def _refusal(found: os.stat_result, kind: str, is_kind: bool) -> str | None:
    if not is_kind:
        return f"it is not a {kind}"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to {os.geteuid()}"
    if found.st_mode & _OTHERS_WRITE:
        return f"others can write to it (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def _usable() -> Path | None:
    """The directory, made where it is missing; None, with a warning, where it must not be used."""
    folder = directory()
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        reason = _refusal(found, "directory", stat.S_ISDIR(found.st_mode))
    except OSError as error:
        reason = str(error)
    if reason is not None:
        warnings.warn(f"pyllm.jit: the cache {folder} is not used: {reason}; compiled variants are not kept", RuntimeWarning, stacklevel=2)
        return None
    return folder


def load(digest: str) -> bytes | None:
    """The code kept under a digest; None where there is none, or none that can be trusted."""
    folder = _usable()
    if folder is None:
        return None
    path = folder / f"{digest}.cubin"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"pyllm.jit: {path} is not used: {error}", RuntimeWarning, stacklevel=2)
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        reason = _refusal(found, "regular file", stat.S_ISREG(found.st_mode))
        if reason is not None:
            warnings.warn(f"pyllm.jit: {path} is not used: {reason}", RuntimeWarning, stacklevel=2)
            return None
        content = file.read()
    code = content[_SUM:]
    return code if code and hashlib.sha256(code).digest() == content[:_SUM] else None  # cut off or damaged: compiled again


def store(digest: str, code: bytes) -> None:
    """Keep code. The file appears whole or not at all, whoever else writes the same one."""
    folder = _usable()
    if folder is None:
        return
    try:
        handle, name = tempfile.mkstemp(prefix=f".{digest[:16]}.", dir=folder)  # mode 0600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(name, folder / f"{digest}.cubin")
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        warnings.warn(f"pyllm.jit: cannot keep compiled code in {folder}: {error}", RuntimeWarning, stacklevel=2)
