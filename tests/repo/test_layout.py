"""One op, one stem, five places; small files; nothing that must not be in the package."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from pyllm.ops.registry import OpInfo
from tests.repo.sources import ALL_OPS, KERNEL_OPS, files, name
from tools.digest import CSRC, ROOT

TOO_LONG: dict[str, str] = {}
"""file, or file:function -> why it may pass the budget."""


@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
def test_a_kernel_op_has_its_sources(op: OpInfo) -> None:
    missing = [f"csrc/{op.stem}{suffix}" for suffix in (".cuh", ".cu", ".h") if not (CSRC / f"{op.stem}{suffix}").is_file()]
    assert not missing, f"{op.name}: no {', '.join(missing)}"
    folder = op.stem.split("/")[0]
    assert any(f'"{op.name}"' in path.read_text(encoding="utf-8") for path in (CSRC / folder).glob("bind*.cpp")), (
        f"{op.name}: not registered in csrc/{folder}/bind.cpp"
    )


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_an_op_has_its_documentation_test_and_bench(op: OpInfo) -> None:
    folder, stem = op.stem.split("/")
    module, function = op.public.rsplit(".", 1)
    assert getattr(importlib.import_module(module), function).__doc__, f"{op.public} has no docstring"
    # A composition has no kernel of ours to measure.
    places = [f"tests/{folder}/test_{stem}.py"] + ([] if op.composition else [f"bench/{folder}/bench_{stem}.py"])
    missing = [place for place in places if not (ROOT / place).is_file()]
    assert not missing, f"{op.name}: no {', '.join(missing)}"


SHARED_BY_MODELS = {"__init__.py", "hf.py", "defaults.py", "moe_defaults.py", "fields.py", "ropes.py"}
"""Read every config.json for all architectures; the short budget is that of a declaration, one architecture a file."""


def budget(path: Path) -> int:
    where = path.relative_to(ROOT).parts
    if path.suffix in (".cu", ".cuh"):
        return 600
    if path.suffix in (".cpp", ".h"):
        return 300
    if where[:2] == ("pyllm", "models") and path.name not in SHARED_BY_MODELS:
        return 40
    return 500 if where[0] == "tests" else 300


def test_files_are_short() -> None:
    long = []
    for path in files("*.py", "*.cu", "*.cuh", "*.cpp", "*.h"):
        lines = path.read_text(encoding="utf-8").count("\n")
        if lines > budget(path) and name(path) not in TOO_LONG:
            long.append(f"{name(path)}: {lines} lines, at most {budget(path)}")
    assert not long, "\n".join(long)


def test_the_executor_can_be_read_in_an_hour() -> None:
    """What a user holds, plans, measurements and the Python twins of csrc/runtime are other folders (docs/design.md)."""
    lines = {name(path): path.read_text(encoding="utf-8").count("\n") for path in files("*.py", under="pyllm/runtime")}
    assert len(lines) > 10
    assert sum(lines.values()) <= 2500, f"pyllm/runtime has {sum(lines.values())} lines, at most 2500: {lines}"


def test_functions_are_short() -> None:
    long = []
    for path in files("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 60 and f"{name(path)}:{node.name}" not in TOO_LONG:
                    long.append(f"{name(path)}:{node.lineno} {node.name}: {lines} lines, at most 60")
    assert not long, "\n".join(long)


MAY_USE = {
    "jit": set(),
    "ops": {"jit"},
    "layers": {"ops", "jit", "runtime.batch"},
    "models": {"layers", "jit"},
    "load": {"layers", "models"},
    "twins": set(),
    "runtime": {"ops", "layers", "twins", "plan.pages", "plan.calibrate", "api.params", "api.checks", "api.retention", "api.text"},
    "plan": {"ops", "layers", "runtime.batch", "runtime.kv", "runtime.graph", "api.checks", "api.model"},
    "api": {"ops", "layers", "models", "load", "twins", "plan", "runtime"},
    "measure": {"api"},
}
"""A folder of pyllm -> the folders, or single modules of them, that its modules import (docs/design.md, "Layers of the code")."""


def imported(path: Path) -> set[str]:
    """Modules of pyllm that a file imports, anywhere in it, as "folder.module"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, f"{name(path)}:{node.lineno}: an import from above its folder"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module.removeprefix("pyllm.") for module in found if module.startswith("pyllm.")}


@pytest.mark.parametrize("room", sorted(path.parent.name for path in (ROOT / "pyllm").glob("*/__init__.py")))
def test_a_room_uses_what_lies_below_it(room: str) -> None:
    allowed = {(*use.split("."),) for use in MAY_USE[room] | {room}}
    bad = []
    for path in files("*.py", under=f"pyllm/{room}"):
        used = [tuple(module.split(".")) for module in imported(path)]
        bad += [f"{name(path)}: pyllm.{'.'.join(u)}" for u in used if u[0] in MAY_USE and u[:1] not in allowed and u[:2] not in allowed]
    assert not bad, "\n".join(sorted(bad))


FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "torch.load", "torch.save", "os.system", "os.getenv", "os.popen", "numpy.load", "np.load"}


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", files("*.py", under="pyllm"), ids=name)
def test_the_package_runs_no_code_from_files_and_reads_no_environment(path: Path) -> None:
    bad = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            bad += [f"{node.lineno}: import {a.name}" for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            bad.append(f"{node.lineno}: from {node.module} import ...")
        elif isinstance(node, ast.Call) and dotted(node.func) in FORBIDDEN_CALLS:
            bad.append(f"{node.lineno}: {dotted(node.func)}(...)")
        elif isinstance(node, ast.Attribute) and dotted(node) == "os.environ":
            bad.append(f"{node.lineno}: os.environ")
    assert not bad, f"{name(path)}: {'; '.join(bad)}"


def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = [
        f"{name(path)}:{number}"
        for path in files("*.py", "*.cu", "*.cuh", "*.cpp", "*.h", "*.md", "Makefile")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if marks.search(line)
    ]
    assert not found, ", ".join(found)


def test_torch_headers_stay_out_of_kernels() -> None:
    """An edit to a kernel rebuilds one unit, and the device code compiles under NVRTC: only bind*.cpp and their three headers see torch."""
    allowed = {CSRC / "common" / "check.h", CSRC / "common" / "bind.h", CSRC / "attention" / "bind_checks.h"}
    torch_header = re.compile(r'#\s*include\s+(?:["<](?:torch|ATen|c10)/|"common/(?:check|bind)\.h")')
    found = [
        name(path)
        for path in files("*.cu", "*.cuh", "*.h", under="csrc")
        if path not in allowed and torch_header.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, ", ".join(found)


def test_only_launch_h_launches() -> None:
    """`launch` adds programmatic dependent launch and checks the result; <<< >>> does neither."""
    found = [name(path) for path in files("*.cu", "*.cuh", "*.cpp", "*.h", under="csrc") if "<<<" in path.read_text(encoding="utf-8")]
    assert not found, ", ".join(found)
