"""pyllm: CUDA kernels for LLM inference, model layers to compose, and a lean executor. Submodules load on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = ("layers", "load", "models", "ops", "runtime")
__all__ = ["__version__", *_SUBMODULES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"pyllm.{name}")
    raise AttributeError(f"module 'pyllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
