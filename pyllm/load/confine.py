"""File names from strangers stay inside the directory they came with."""

from __future__ import annotations

import os
import re
from pathlib import Path

from .errors import CheckpointError, show


def confined(directory: Path, name: str, field: str) -> Path:
    """`directory / name` for a plain file name (no separator, no leading dot) whose links, if any, end in the same directory.

    One exception: the hub cache keeps `snapshots/<revision>/name` as links into `blobs/` of the same model folder.
    """
    if len(name) > 255 or not re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII):
        raise CheckpointError(f"{field}: {show(name)} is not a plain file name")
    root = os.path.realpath(directory)
    target = os.path.realpath(os.path.join(root, name))
    allowed = [root]
    if os.path.basename(os.path.dirname(root)) == "snapshots":
        allowed.append(os.path.join(os.path.dirname(os.path.dirname(root)), "blobs"))
    if os.path.dirname(target) not in allowed:
        raise CheckpointError(f"{field}: {show(name)} leads out of the model directory")
    return Path(directory) / name
