"""Which compilers this machine has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path


def find_cuda_home() -> Path | None:
    """The CUDA toolkit's folder. `nvcc` on the path may be a wrapper elsewhere, so a folder counts only with the headers beside it."""
    on_path = shutil.which("nvcc")
    candidates = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", on_path and Path(on_path).resolve().parent.parent]
    for home in (Path(c) for c in candidates if c):
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime.h").is_file():
            return home
    return None


def nvcc_release(home: Path) -> str:
    """ "13.0.88": the version of the toolkit's compiler."""
    text = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"V(\d+\.[\d.]+)", text)
    if match is None:
        raise RuntimeError(f"{home}/bin/nvcc --version names no version: {text!r}")
    return match[1]


def has_cxx() -> bool:
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def ninja_on_path() -> None:
    """torch looks for ninja on the path alone; a ninja that pip installed may be elsewhere when Python was started by its full name."""
    if shutil.which("ninja"):
        return
    import ninja

    os.environ["PATH"] = f"{ninja.BIN_DIR}{os.pathsep}{os.environ['PATH']}"
