"""The kernel library: built from these sources, loads beside this torch, registers every kernel, spills nowhere, and its C++ signatures
agree with the schemas (the stable ABI itself checks nothing: a C++ `float` for a schema `float` silently reads 0)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pyllm import _native
from pyllm.ops.registry import OpInfo
from tests.repo.sources import ALL_OPS, KERNEL_OPS, name
from tools import ptxas, toolchain
from tools.digest import CSRC, ROOT, architectures, csrc_digest, included, kernel_sources, op_digest, unit_architectures

LIBRARY = ROOT / "pyllm" / "_kernels.so"
needs_library = pytest.mark.skipif(toolchain.find_cuda_home() is None and not LIBRARY.exists(), reason="no nvcc here, no kernel library")

SPILLS_ALLOWED: dict[str, tuple[int, str]] = {
    "PrefillShape<256": (40, "a few registers of the form with window, softcap and masks"),
    "PrefillShape<96": (8, "two registers"),
    "PrefillShape<192, 128": (4, "one register"),
    "decode_step_kernel<": (108, "attention with D = 128 beside the state of the products"),
}
"""Shape of a kernel (its name without the dtype) -> bytes a thread may store, and why. Every other kernel may not spill."""

PICKS = {"csrc/step/decode_step.cu"}
"""Units that need the sizes of a kernel, which others instantiate, and hold none."""


@needs_library
def test_library_is_built_from_these_sources() -> None:
    assert LIBRARY.exists(), "nvcc is here, but pyllm/_kernels.so is not: make build"
    assert _native.build_report()["digest"] == csrc_digest(), "csrc or the flags changed since the build: make build"


@needs_library
def test_library_loads_beside_this_torch() -> None:
    """On a CPU build of torch as well: everything that only a CUDA build has is a weak symbol."""
    reason = _native.load()
    assert reason is None, reason


@needs_library
@pytest.mark.parametrize("op", KERNEL_OPS, ids=lambda op: op.name)
def test_every_kernel_op_has_its_cuda_kernel(op: OpInfo) -> None:
    _native.load()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pyllm::{op.name}", "CUDA"), f'csrc/*/bind.cpp has no m.impl("{op.name}", ...)'


@needs_library
def test_the_library_registers_no_unknown_op() -> None:
    bound = set(bindings())
    assert bound <= {op.name for op in KERNEL_OPS}, f"bound in C++, not defined as a kernel op: {bound - {op.name for op in KERNEL_OPS}}"


def _spill_bytes(kernel: str) -> int:
    shape = re.sub(r"<(__half|__nv_bfloat16), ", "<", kernel)
    return max((most for part, (most, _) in SPILLS_ALLOWED.items() if part in shape), default=0)


@needs_library
def test_no_kernel_spills() -> None:
    units = _native.build_report()["units"]
    assert set(units) == {name(path) for path in kernel_sources() if path.suffix == ".cu"}
    spills = [
        f"{unit}: {kernel['name']} ({kernel['arch']}): {kernel['spill_stores']} bytes stored, {kernel['spill_loads']} loaded"
        for unit, kernels in units.items()
        for kernel in kernels
        if kernel["spill_stores"] > _spill_bytes(kernel["name"]) or (kernel["spill_loads"] and not _spill_bytes(kernel["name"]))
    ]
    assert not spills, "\n".join(spills)


@needs_library
def test_the_report_covers_every_unit_and_architecture() -> None:
    report = _native.build_report()
    for unit, kernels in report["units"].items():
        if unit in PICKS or not any("__global__" in path.read_text(encoding="utf-8") for path in included(ROOT / unit)):
            assert not kernels, f"{unit}: kernels from nowhere"  # it only picks a unit
            continue
        assert kernels, f"{unit} holds no kernel"
        archs = unit_architectures(ROOT / unit, tuple(report["architectures"]))
        assert {kernel["arch"] for kernel in kernels} == {f"sm_{arch}" for arch in archs}, unit
        assert all(0 < kernel["registers"] <= 255 for kernel in kernels), unit


def bindings() -> dict[str, str]:
    """op name -> the C++ function that its folder's bind.cpp registers for it, as "file:function"."""
    found: dict[str, str] = {}
    for path in sorted(CSRC.glob("*/bind*.cpp")):
        text = path.read_text(encoding="utf-8")
        for op, function in re.findall(r'm\.impl\(\s*"(\w+)"\s*,\s*PYLLM_BOX\(\s*&?\s*([\w:]+)\s*\)', text):
            assert op not in found, f"{op} is bound in {found[op]} and in {name(path)}"
            found[op] = f"{name(path)}:{function.split('::')[-1]}"
        assert len(re.findall(r"m\.impl\(", text)) == sum(f.startswith(f"{name(path)}:") for f in found.values()), (
            f"{name(path)}: every m.impl goes through PYLLM_BOX"
        )
    return found


def split_types(text: str) -> list[str]:
    """Split at the commas that are not inside <>."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char == "<") - (char == ">")
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part.strip() for part in [*parts, current] if part.strip()]


def cpp_type(text: str) -> str:
    """`const std::optional<torch::stable::Tensor>& scale` -> `optional<Tensor>`."""
    text = re.sub(r"\bconst\b|&|\b(?:std|torch|stable|pyllm)::", "", text)
    return re.sub(r"\s+", " ", text).strip()


def cpp_signature(where: str) -> tuple[str, list[str]]:
    file, function = where.split(":")
    text = re.sub(r"//[^\n]*", "", Path(ROOT / file).read_text(encoding="utf-8"))
    found = re.search(rf"^([\w:<>, &]+?)\s+{function}\s*\(([^)]*)\)\s*\{{", text, re.MULTILINE)
    assert found, f"{file}: no definition of {function}"
    parameters = [re.sub(r"\s*\b\w+$", "", parameter).strip() for parameter in split_types(found[2])]
    aliases = {alias: cpp_type(of) for alias, of in re.findall(r"using (\w+) = ([^;]+);", text)}
    result, *types = [aliases.get(kind, kind) for kind in map(cpp_type, [found[1], *parameters])]
    return result, types


CPP_OF_SCHEMA = {"Tensor": "Tensor", "int": "int64_t", "SymInt": "int64_t", "float": "double", "bool": "bool"}


def expected_cpp(schema_type: str) -> str:
    wrapped = re.fullmatch(r"(Optional|List)\[(.+)\]", schema_type)
    if wrapped:
        return f"{'optional' if wrapped[1] == 'Optional' else 'vector'}<{expected_cpp(wrapped[2])}>"
    return CPP_OF_SCHEMA[schema_type]


@pytest.mark.parametrize("op", [op for op in KERNEL_OPS if op.name in bindings()], ids=lambda op: op.name)
def test_cpp_signature_agrees_with_the_schema(op: OpInfo) -> None:
    schema = torch._C.parse_schema(f"pyllm::{op.schema}")
    result, parameters = cpp_signature(bindings()[op.name])
    assert parameters == [expected_cpp(str(argument.type)) for argument in schema.arguments]
    returns = [expected_cpp(str(value.type)) for value in schema.returns]
    assert result == {0: "void", 1: returns[0] if returns else ""}.get(len(returns), f"tuple<{', '.join(returns)}>")


def test_digests_follow_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op's digest changes with a header it includes through another and with a unit of its kernel, not with a header it does not
    include."""
    monkeypatch.setattr("tools.digest.ROOT", tmp_path)
    monkeypatch.setattr("tools.digest.CSRC", tmp_path / "csrc")
    texts = {
        "norm/a.cu": '#include "norm/a.h"\n',
        "norm/a.h": '#include "common/x.h"\n',
        "norm/a.cuh": "// device code\n",
        "norm/a_wide.cu": '#include "norm/a.cuh"  // 64\n',
        "common/x.h": '#include "y.h"\n',
        "common/y.h": "// y\n",
        "common/z.h": "// z\n",
    }
    for file, text in texts.items():
        path = tmp_path / "csrc" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before, whole = op_digest("norm/a"), csrc_digest()
    (tmp_path / "csrc/common/z.h").write_text("// another\n")
    assert op_digest("norm/a") == before
    assert csrc_digest() != whole
    (tmp_path / "csrc/norm/a_wide.cu").write_text('#include "norm/a.cuh"  // 128\n')
    assert op_digest("norm/a") != before, "a unit that instantiates a.cuh is part of the op"
    before = op_digest("norm/a")
    (tmp_path / "csrc/common/y.h").write_text("// another\n")
    assert op_digest("norm/a") != before
    (tmp_path / "csrc/common/x.h").write_text('#include "gone.h"\n')
    with pytest.raises(FileNotFoundError, match=r'common/x\.h: #include "gone\.h"'):
        op_digest("norm/a")


def test_every_include_of_csrc_resolves() -> None:
    for path in kernel_sources():
        included(path)


@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_every_op_has_a_digest(op: OpInfo) -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", op_digest(op.stem))


def test_architectures_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYLLM_CUDA_ARCHS", raising=False)
    assert architectures() == ("90a",)
    monkeypatch.setenv("PYLLM_CUDA_ARCHS", "80, 89;90a")
    assert architectures() == ("80", "89", "90a")
    monkeypatch.setenv("PYLLM_CUDA_ARCHS", "hopper")
    with pytest.raises(ValueError, match="'hopper' is not an architecture"):
        architectures()


def test_units_of_hopper_instructions_are_built_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYLLM_CUDA_ARCHS", "80;90a")
    plain, hopper = CSRC / "attention/simple_attention.cu", CSRC / "sampling/sample_tokens.cu"
    assert unit_architectures(plain) == ("80", "90a")
    assert unit_architectures(hopper) == ("90a",)
    assert unit_architectures(hopper, ("80", "89")) == ("90a",)
    assert unit_architectures(plain, ("89",)) == ("89",)


def test_no_other_unit_has_unguarded_instructions_of_hopper() -> None:
    """It would not compile for the architectures before, which a build for sm_90a alone does not show."""
    hopper = re.compile(r'"[^"\n]*\b(?:wgmma|cp\.async\.bulk|mapa|barrier\.cluster|setmaxnreg|griddepcontrol|expect_tx)\b')
    for unit in (path for path in kernel_sources() if path.suffix == ".cu" and unit_architectures(path, ("80",)) == ("80",)):
        for path in included(unit):
            text = path.read_text(encoding="utf-8")
            bare = re.sub(r"^#if [^\n]*__CUDA_ARCH__ >= 900$.*?^#endif$", "", text, flags=re.MULTILINE | re.DOTALL)
            assert not (found := hopper.search(bare)), f"{name(path)}, a part of {name(unit)}: {found[0] if found else ''}"


def test_ptxas_report_is_read() -> None:
    log = """
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function '_Z1av' for 'sm_90a'
ptxas info    : Function properties for _Z1av
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 2048 bytes smem, 528 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'
ptxas info    : Function properties for _Z1bv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
"""
    first, second = ptxas.parse(log)
    assert first == {"symbol": "_Z1av", "arch": "sm_90a", "registers": 255, "stack": 16, "spill_stores": 8, "spill_loads": 12, "smem": 2048}
    assert (second["symbol"], second["registers"], second["spill_stores"], second["smem"]) == ("_Z1bv", 10, 0, 0)


@pytest.mark.parametrize(
    ("arch", "device", "runs"),
    [
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("80", (8, 9), True),
        ("89", (8, 0), False),
        ("90", (9, 0), True),
        ("80", (9, 0), False),
    ],
)
def test_which_device_runs_which_code(arch: str, device: tuple[int, int], runs: bool) -> None:
    assert _native._runs_on(arch, *device) is runs
