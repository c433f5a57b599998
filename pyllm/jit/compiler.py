"""From a variant to machine code: NVRTC through cuda.core, with the cache in front."""

from __future__ import annotations

import hashlib
import importlib
import shutil
import sysconfig
from functools import cache as once
from pathlib import Path
from typing import Any

import torch

from pyllm.jit import cache
from pyllm.jit.source import ELEMENTS, generate, include_folders, templates_digest
from pyllm.jit.variant import AttentionVariant

_HEADERS = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp")
_STD = "c++20"
_ERRORS = (117, 549, 940)  # NVRTC only warns of code that returns nothing, or a value never set: scores would be what a register held


class CompileError(ValueError):
    """The compiler's words about a variant, with the user's own lines."""


def unavailable() -> str | None:
    """Why variants cannot be compiled here; None where they can."""
    try:
        _compiler()
        header_folder()
    except RuntimeError as error:
        return str(error)
    return None


@once
def _compiler() -> tuple[Any, tuple[int, int]]:
    """The module that holds Program, and NVRTC's version."""
    advice = "pip install cuda-core 'nvidia-cuda-nvrtc==13.*'"
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        core = importlib.import_module("cuda.core")
        if not hasattr(core, "Program"):
            core = importlib.import_module("cuda.core.experimental")  # before version 0.5
    except ImportError as error:
        raise RuntimeError(f"pyllm.jit: variants need cuda-python ({error}): {advice}") from None
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the bindings raise classes of their own for a library that is not there
        raise RuntimeError(f"pyllm.jit: NVRTC does not load ({error}): {advice}") from None
    if int(status):
        raise RuntimeError(f"pyllm.jit: NVRTC gives error {int(status)} for its version")
    return core, (major, minor)


@once
def header_folder() -> Path:
    """Where cuda_fp16.h and cuda_bf16.h are: beside the toolkit, or in NVIDIA's wheels."""
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    nvcc = shutil.which("nvcc")
    folders = [*site.glob("cu1*/include"), site / "cuda_runtime" / "include", Path("/usr/local/cuda/include")]
    if nvcc:
        folders.insert(0, Path(nvcc).resolve().parent.parent / "include")
    try:
        finder = importlib.import_module("cuda.pathfinder").find_nvidia_header_directory
        folders.insert(0, Path(finder("cudart") or "/nonexistent"))
    except (ImportError, AttributeError):  # older than the finder
        pass
    for folder in folders:
        if all((folder / name).is_file() for name in _HEADERS):
            return folder
    looked = ", ".join(map(str, folders))
    raise RuntimeError(f"pyllm.jit: cuda_fp16.h and cuda_bf16.h are in none of {looked}: pip install 'nvidia-cuda-runtime==13.*'")


@once
def _base_digest() -> str:
    """Everything that decides about the code but the variant's source and the architecture."""
    _, version = _compiler()
    sha = hashlib.sha256(f"{version} {_STD} {_ERRORS} {templates_digest()}".encode())
    for name in _HEADERS:
        sha.update(hashlib.sha256((header_folder() / name).read_bytes()).digest())
    return sha.hexdigest()


def compile_variant(
    variant: AttentionVariant,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    value_dim: int | None = None,
    fp8: bool = False,
    arch: str = "sm_90",
) -> bytes:
    """The machine code of a variant for head dims D and Dv, q's dtype and an architecture, from the cache or NVRTC; fp8: for e4m3 keys and
    values. Needs no GPU.

    Errors: ValueError for arguments, CompileError (a ValueError) with NVRTC's words, RuntimeError where cuda-python, NVRTC or CUDA's
    headers are missing.
    """
    values = dim if value_dim is None else value_dim
    for name, size in (("dim", dim), ("value_dim", values)):
        if size % (16 if fp8 else 8) or not 8 <= size <= 256:
            raise ValueError(f"compile_variant: {name} is {size}, expected a multiple of {16 if fp8 else 8} up to 256")
    if dtype not in ELEMENTS:
        raise ValueError(f"compile_variant: dtype is {dtype}, expected torch.bfloat16 or torch.float16")
    if not arch.startswith("sm_") or not arch[3:].isdigit() or int(arch[3:]) < 80:
        raise ValueError(f"compile_variant: arch is {arch!r}, expected 'sm_80' or later")
    source = generate(variant, dim, values, dtype, fp8)
    digest = hashlib.sha256(f"{_base_digest()} {arch}\n{source}".encode()).hexdigest()
    code = cache.load(digest)
    if code is None:
        code = _compile(variant, source, arch)
        cache.store(digest, code)
    return code


def _compile(variant: AttentionVariant, source: str, arch: str) -> bytes:
    core, _ = _compiler()
    folders = [str(folder) for folder in (*include_folders(), header_folder())]
    options = core.ProgramOptions(name=f"{variant.name}.cu", arch=arch, std=_STD, include_path=folders, diag_error=list(_ERRORS))
    try:
        return bytes(core.Program(source, "c++", options).compile("cubin").code)
    except Exception as error:  # cuda.core's own class, which moved between its versions
        raise CompileError(f"variant {variant.name} does not compile for {arch}:\n{str(error).strip()}") from None
