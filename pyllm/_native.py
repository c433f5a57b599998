"""Loads the kernel library, once, and says what it holds and where its kernels can run."""

from __future__ import annotations

import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch

_LIBRARY = Path(__file__).with_name("_kernels.so")
_REPORT = Path(__file__).with_name("_kernels.json")
_OLDEST_TORCH = (2, 10)  # the LibTorch stable ABI that the library asks for

_OLDEST_GPU = (8, 0)


@functools.cache
def load() -> str | None:
    """Load the library beside the schemas of `pyllm.ops`; None when that worked, else the reason why there are no kernels.

    It is loaded on a CPU build of torch too: nothing can call its kernels there, but that they register is tested.
    """
    reason = _load()
    if reason is not None and torch.cuda.is_available():
        warnings.warn(
            f"pyllm: no CUDA kernels ({reason}); ops with kernels will fail on CUDA tensors, all work on CPU tensors", stacklevel=2
        )
    return reason


def _load() -> str | None:
    if not _LIBRARY.exists():
        return "built without nvcc"
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version < _OLDEST_TORCH:
        return f"torch is {torch.__version__}, the kernel library needs 2.10 or later"
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        return f"{_LIBRARY.name} does not load: {error}"
    return _missing_architecture()


def _missing_architecture() -> str | None:
    """A reason when a GPU is present that the library holds no code for."""
    if not torch.cuda.is_available():
        return None
    built = build_report().get("architectures", [])
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) < _OLDEST_GPU:
            return f"cuda:{index} ({torch.cuda.get_device_name(index)}) is sm_{major}{minor}, the kernels need sm_80 or later"
        if not any(_runs_on(arch, major, minor) for arch in built):
            name = torch.cuda.get_device_name(index)
            have = ", ".join(f"sm_{arch}" for arch in built) or "nothing"
            return f"cuda:{index} ({name}) is sm_{major}{minor}, the build has {have}: rebuild with PYLLM_CUDA_ARCHS={major}{minor}"
    return None


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Machine code runs on its own major version, minor or later; code for 90a runs on 9.0 alone."""
    number = int(re.sub(r"\D", "", arch))
    if arch[-1] in "af":
        return number == major * 10 + minor
    return number // 10 == major and number % 10 <= minor


def build_report() -> dict[str, Any]:
    """What the build wrote down: digest of the sources, nvcc, flags, architectures, registers and spills per kernel; {} without a build."""
    return json.loads(_REPORT.read_text(encoding="utf-8")) if _REPORT.exists() else {}


def kernels_available() -> bool:
    """True when ops on CUDA tensors run pyllm's own kernels here."""
    return load() is None and torch.cuda.is_available()


def require_kernels() -> None:
    """Raise, with the reason, where pyllm's kernels cannot run."""
    if not kernels_available():
        raise RuntimeError(f"pyllm: the CUDA kernels cannot run here: {load() or 'no CUDA device'}")


def status_line() -> str:
    """One line for people: where the kernels run, or why they do not."""
    reason = load()
    if reason is not None:
        return f"kernels: CPU references ({reason})"
    if not torch.cuda.is_available():
        return "kernels: CPU references (no CUDA device)"
    archs = ", ".join(f"sm_{arch}" for arch in build_report().get("architectures", []))
    return f"kernels: CUDA {archs} on {torch.cuda.get_device_name()}"
