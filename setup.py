"""Builds the two native parts of pyllm; everything else is in pyproject.toml.

pyllm/_kernels.so    the CUDA kernels, against LibTorch's stable ABI: one file for every Python and torch >= 2.10, with CUDA or without.
pyllm/_runtime.*.so  the host code of the executor (pybind11), tied to one Python; pure-Python twins stand in where it is missing.

Neither compiler is required. A library that was built elsewhere from the same sources (the digest in _kernels.json says so) is kept.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils import cpp_extension  # noqa: E402

from tools import digest, ptxas  # noqa: E402
from tools.toolchain import find_cuda_home, has_cxx, ninja_on_path, nvcc_release  # noqa: E402

KERNELS, RUNTIME = "pyllm._kernels", "pyllm._runtime"
LIBRARY, REPORT = ROOT / "pyllm" / "_kernels.so", ROOT / "pyllm" / "_kernels.json"


def say(text: str) -> None:
    print(f"pyllm: {text}", flush=True)


def kernel_extension() -> Extension | None:
    """The kernel library, or None where it need not or cannot be built (said in one line)."""
    if not digest.kernel_sources():
        return None
    built_from = json.loads(REPORT.read_text())["digest"] if LIBRARY.exists() and REPORT.exists() else None
    if built_from == digest.csrc_digest():
        say("kernels are up to date")
        return None
    home = find_cuda_home()
    if home is None or not has_cxx():
        if LIBRARY.exists():
            raise SystemExit(
                f"pyllm: {LIBRARY} was built from other sources or flags, and nvcc and a C++ compiler to rebuild it were not found; "
                "delete it to go on with the CPU references"
            )
        say("no nvcc with its headers and C++ compiler found: CPU references alone, no CUDA kernels")
        return None
    # A CPU build of torch names no toolkit; and torch's own CUDA version does not matter here, since the library links its own static
    # runtime. With the version set, torch's builder also writes dependency files, so that an edited header rebuilds its kernels.
    cpp_extension.CUDA_HOME = str(home)
    torch.version.cuda = ".".join(nvcc_release(home).split(".")[:2])
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + [f"-L{home}/lib64"]
    return Extension(
        KERNELS,
        [str(path.relative_to(ROOT)) for path in digest.kernel_sources()],
        include_dirs=[str(digest.CSRC), *cpp_extension.include_paths(), str(home / "include")],
        extra_compile_args={"cxx": list(digest.CXX_FLAGS), "nvcc": list(digest.nvcc_flags())},
        # libtorch must stay a dependency although nothing in it is named: through it the loader reaches libtorch_cuda's symbols.
        extra_link_args=[
            *libraries,
            *("-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu", "-lc10"),
            *("-lcudart_static", "-lrt", "-lpthread", "-ldl", "-Wl,--exclude-libs,ALL"),
        ],
    )


def runtime_extension() -> Extension | None:
    if not digest.runtime_sources():
        return None
    if not has_cxx():
        say("no C++ compiler found: the executor's host code runs in Python")
        return None
    import pybind11

    return Extension(
        RUNTIME,
        [str(path.relative_to(ROOT)) for path in digest.runtime_sources()],
        include_dirs=[str(digest.CSRC), pybind11.get_include()],
        extra_compile_args={"cxx": list(digest.RUNTIME_FLAGS)},
        language="c++",
    )


class NinjaOutput(threading.Thread):
    """Reads ninja's output: all of it to `log`, what ptxas said of a unit beside its object file, a short line per unit to the terminal."""

    _STEP = re.compile(r"\[(\d+/\d+)\] .* -c (\S+) -o (\S+)")

    def __init__(self, pipe: int, log: Path, terminal: int) -> None:
        super().__init__(daemon=True)
        self._pipe, self._log, self._terminal = pipe, log, terminal

    def run(self) -> None:
        unit: Path | None = None
        with os.fdopen(self._pipe, errors="replace") as lines, self._log.open("w") as log:
            for line in lines:
                log.write(line)
                if line.startswith(("g++ ", "copying ", "ninja: no work")):
                    continue
                if match := self._STEP.match(line):
                    unit = Path(f"{match[3]}.ptxas")
                    unit.write_text("")
                    line = f"[{match[1]}] {os.path.relpath(match[2], ROOT)}\n"
                elif unit is not None and ("ptxas info" in line or "bytes stack frame" in line):
                    with unit.open("a") as report:
                        report.write(line)
                    continue
                os.write(self._terminal, line.encode())


@contextmanager
def ninja_output(log: Path):
    """Everything written to file descriptor 1 (ninja's, too) passes through NinjaOutput while this is open."""
    sys.stdout.flush()
    terminal = os.dup(1)
    read_end, write_end = os.pipe()
    reader = NinjaOutput(read_end, log, terminal)
    os.dup2(write_end, 1)
    os.close(write_end)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(terminal, 1)
        reader.join()
        os.close(terminal)


class BuildNative(cpp_extension.BuildExtension):
    """BuildExtension with a report: registers and spills of each kernel go to pyllm/_kernels.json."""

    def run(self) -> None:
        if self.editable_mode:  # objects of an earlier build are taken, as pip's temporary folder has none
            self.build_temp = str(ROOT / "build" / f"temp.{self.plat_name}-{sys.implementation.cache_tag}")
        # Two builds of one tree would write the same objects.
        (ROOT / "build").mkdir(exist_ok=True)
        with (ROOT / "build" / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()

    def get_ext_filename(self, ext_name: str) -> str:
        if ext_name.split(".")[-1] == "_kernels":
            return os.path.join(*ext_name.split(".")) + ".so"
        return super().get_ext_filename(ext_name)

    def build_extension(self, ext: Extension) -> None:
        base, self.build_temp = self.build_temp, os.path.join(self.build_temp, ext.name)
        try:
            os.makedirs(self.build_temp, exist_ok=True)
            if ext.name != KERNELS:
                with ninja_output(ROOT / "build" / "runtime.log"):
                    super().build_extension(ext)
                return
            say(f"building {len(ext.sources)} kernel files for {', '.join('sm_' + a for a in digest.architectures())}")
            started_from = digest.csrc_digest()
            objects = self._objects(ext)
            for path in objects.values():
                if path.exists() and not Path(f"{path}.ptxas").exists():
                    path.unlink()
            self.force = True  # ninja decides what to compile; setuptools would only look at the sources named, not at headers
            with ninja_output(ROOT / "build" / "kernels.log"), self._flags_by_unit():
                super().build_extension(ext)
            self._write_report(objects, started_from)
        finally:
            self.build_temp = base

    @contextmanager
    def _flags_by_unit(self):
        """torch's builder has one set of flags for all units of an extension: it is asked once for each set of architectures."""
        compile_all = self.compiler.compile

        def compile_groups(sources: list[str], *args: Any, extra_postargs: dict[str, list[str]], **kwargs: Any) -> list[str]:
            groups: dict[tuple[str, ...], list[str]] = {}
            for source in sources:
                groups.setdefault(digest.unit_architectures(ROOT / source), []).append(source)
            found = {}
            for archs, units in groups.items():
                flags = extra_postargs | {"nvcc": list(digest.nvcc_flags(archs))}
                found |= dict(zip(units, compile_all(units, *args, extra_postargs=flags, **kwargs), strict=True))
            return [found[source] for source in sources]

        self.compiler.compile = compile_groups
        try:
            yield
        finally:
            self.compiler.compile = compile_all

    def _objects(self, ext: Extension) -> dict[str, Path]:
        return {source: Path(self.build_temp, source).absolute().with_suffix(".o") for source in ext.sources}

    def _write_report(self, objects: dict[str, Path], built_from: str) -> None:
        home = Path(cpp_extension.CUDA_HOME)
        units = {source: ptxas.parse(Path(f"{path}.ptxas").read_text()) for source, path in objects.items() if source.endswith(".cu")}
        symbols = sorted({str(kernel["symbol"]) for kernels in units.values() for kernel in kernels})
        names = ptxas.demangle(symbols, [home / "bin/cu++filt", "c++filt"])
        for kernels in units.values():
            for kernel in kernels:
                kernel["name"] = names[str(kernel["symbol"])]
        report = {
            "digest": built_from,
            "nvcc": nvcc_release(home),
            "architectures": list(digest.architectures()),
            "flags": {"nvcc": list(digest.nvcc_flags()), "cxx": list(digest.CXX_FLAGS)},
            "units": units,
        }
        text = json.dumps(report, indent=1) + "\n"
        REPORT.write_text(text)
        beside = Path(self.get_ext_fullpath(KERNELS)).parent / REPORT.name  # a wheel is built outside the source tree
        if beside != REPORT:
            beside.write_text(text)


class BuildPython(build_py):
    """build_py, and the templates that pyllm.jit compiles at run time: a source tree has them in csrc, a package beside pyllm.jit."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for path in digest.included(digest.CSRC / "attention" / "variant_attention.cuh"):
            to = Path(self.build_lib, "pyllm", "jit", "csrc", path.relative_to(digest.CSRC))
            to.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(path), str(to))


ninja_on_path()
setup(
    ext_modules=[ext for ext in (kernel_extension(), runtime_extension()) if ext is not None],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython},
)
