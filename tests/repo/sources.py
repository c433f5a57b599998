"""The repository's own files and the registered ops, as the repository tests look at them."""

from __future__ import annotations

from pathlib import Path

import pyllm.ops  # noqa: F401 (defines the ops)
from pyllm.ops.registry import OPS, OpInfo
from tools.digest import ROOT

ALL_OPS: list[OpInfo] = sorted(OPS.values(), key=lambda op: op.name)
KERNEL_OPS: list[OpInfo] = [op for op in ALL_OPS if not op.composition]


def files(*patterns: str, under: str = ".") -> list[Path]:
    """Source files below a folder of the repository, without what the build and the tools make."""
    made = {"build", ".venv", ".git", "__pycache__", ".hypothesis", "pyllm.egg-info"}
    found = [path for pattern in patterns for path in (ROOT / under).rglob(pattern)]
    return sorted(path for path in found if path.is_file() and not made & set(path.relative_to(ROOT).parts))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
