"""pyllm: CUDA kernels for LLM inference, model layers to compose, and a lean executor. Submodules load on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = ("api", "layers", "load", "measure", "models", "ops", "plan", "runtime")
_NAMES = {
    "LLM": "llm",
    "SamplingParams": "params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "KvCacheConfig": "config",
    "KvCacheRetentionConfig": "retention",
    "SchedulerConfig": "config",
    "CudaGraphConfig": "config",
    "DraftTargetDecodingConfig": "config",
    "NGramDecodingConfig": "config",
}
__all__ = ["__version__", *_SUBMODULES, *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"pyllm.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"pyllm.api.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'pyllm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
