"""What the kernel library is built from: sources, flags and architectures, and digests over them.

`setup.py` builds with these flags; `_kernels.json` and the bench records carry the digests, so that a record or a carried library
says which sources it belongs to. Standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
HOST_FOLDER = "runtime"
KERNEL_SUFFIXES = (".cu", ".cuh", ".h")
SUFFIXES = (*KERNEL_SUFFIXES, ".cpp")

# 0x020A...: the oldest LibTorch stable ABI the library runs on (2.10); one build then serves every later torch.
_COMMON_FLAGS = ("-DTORCH_TARGET_VERSION=0x020A000000000000", "-DUSE_CUDA", "-std=c++20", "-O3")
CXX_FLAGS = (*_COMMON_FLAGS, "-g0", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas")
# torch's builder switches the half and bfloat16 operators off; the kernels are compiled as plain nvcc would.
_RESTORED = tuple(f"-U__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"))
NVCC_FLAGS = (
    *_COMMON_FLAGS,
    *_RESTORED,
    "--compiler-options=-fvisibility=hidden",
    "-lineinfo",
    "--ptxas-options=-v",
    "--ptxas-options=--warn-on-spills",
)
RUNTIME_FLAGS = ("-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall")

# A unit that includes one of these is made of instructions that sm_90a alone has.
HOPPER_HEADERS = frozenset({"common/ptx_sm90.cuh", "common/wgmma.cuh", "sampling/cluster.cuh"})

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_ARCH = re.compile(r"\d{2,3}[af]?")


def architectures() -> tuple[str, ...]:
    """The architectures of the build, from PYLLM_CUDA_ARCHS ("80,90a"), by default ("90a",)."""
    archs = tuple(a for a in re.split(r"[,; ]+", os.environ.get("PYLLM_CUDA_ARCHS", "90a")) if a)
    for arch in archs:
        if not _ARCH.fullmatch(arch):
            raise ValueError(f"PYLLM_CUDA_ARCHS: {arch!r} is not an architecture, expected numbers like 90a or 80, separated by commas")
    return archs or ("90a",)


def unit_architectures(unit: Path, archs: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Those of a build's architectures (by default this one's) that a translation unit is compiled for. A unit for sm_90a alone is compiled
    for it in every build, since its host code is needed; its launches fail with a clear error elsewhere."""
    every = architectures() if archs is None else archs
    if not any(path.relative_to(CSRC).as_posix() in HOPPER_HEADERS for path in included(unit)):
        return every
    return tuple(arch for arch in every if arch == "90a") or ("90a",)


def nvcc_flags(archs: tuple[str, ...] | None = None) -> tuple[str, ...]:
    every = architectures() if archs is None else archs
    return (*NVCC_FLAGS, *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in every))


def kernel_sources() -> list[Path]:
    """Every translation unit of the kernel library, in a fixed order."""
    return sorted(path for path in CSRC.glob("*/*.c*") if path.suffix in (".cu", ".cpp") and path.parent.name != HOST_FOLDER)


def runtime_sources() -> list[Path]:
    return sorted((CSRC / HOST_FOLDER).glob("*.cpp"))


def included(path: Path) -> list[Path]:
    """The files of csrc that `path` includes, itself first, transitively."""
    seen: dict[Path, None] = {}
    todo = [path.resolve()]
    while todo:
        current = todo.pop(0)
        if current in seen:
            continue
        seen[current] = None
        for name in _INCLUDE.findall(current.read_text(encoding="utf-8")):
            todo.append(_resolve(name, current))
    return list(seen)


def _resolve(name: str, by: Path) -> Path:
    for folder in (by.parent, CSRC):
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise FileNotFoundError(f'{by.relative_to(ROOT)}: #include "{name}" is in neither its folder nor csrc')


def _digest(paths: list[Path], flags: tuple[str, ...]) -> str:
    sha = hashlib.sha256("\0".join(flags).encode())
    for path in sorted(paths):
        sha.update(f"\0{path.relative_to(ROOT).as_posix()}\0".encode())
        sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()


def op_digest(stem: str) -> str:
    """The digest of one op ("norm/rms_norm"): its kernel's sources, the units that instantiate its .cuh, all they include from csrc,
    and the flags.

    An op without a kernel of its own is what its Python module says.
    """
    own = [CSRC / f"{stem}{suffix}" for suffix in KERNEL_SUFFIXES if (CSRC / f"{stem}{suffix}").is_file()]
    if own:
        device = (CSRC / f"{stem}.cuh").resolve()
        own += [unit for unit in device.parent.glob("*.cu") if unit not in own and device in included(unit)]
        return _digest(sorted({path for file in own for path in included(file)}), nvcc_flags())
    module = ROOT / "pyllm" / "ops" / f"{stem.split('/')[0]}.py"
    if not module.is_file():
        raise FileNotFoundError(f"op_digest: {stem!r} has neither csrc/{stem}.cu nor {module.relative_to(ROOT)}")
    return _digest([module], ())


def csrc_digest() -> str:
    """The digest of the kernel library: all of csrc but the host runtime, and the flags of both compilers."""
    files = [path for path in CSRC.glob("*/*") if path.suffix in SUFFIXES and path.parent.name != HOST_FOLDER]
    return _digest(files, (*CXX_FLAGS, "|", *nvcc_flags()))
