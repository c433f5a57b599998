"""Compiling variants: every architecture and head dim, within seconds; what the compiler says points at the user's own lines. No GPU."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyllm.jit import AttentionVariant, CompileError, Param, compile_variant, compiler, use_cache
from tests.jit.examples import alibi, document_mask, every_place, soft_cap

needs_compiler = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyllm.jit.cache._directory", [])
    use_cache(tmp_path / "cache")


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        (alibi(4), "sm_80"),
        (alibi(4), "sm_86"),
        (alibi(4), "sm_89"),
        (alibi(4), "sm_90"),
        (document_mask(8), "sm_90"),
        (soft_cap(3.0), "sm_90"),
        (every_place(0.5), "sm_90"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_examples(variant: AttentionVariant, arch: str) -> None:
    start = time.process_time()  # the compiler runs in this process, which may have to share the processor
    code = compile_variant(variant, 64, arch=arch)
    assert code[:4] == b"\x7fELF"
    for name in (b"variant_many", b"variant_few", b"variant_combine"):
        assert name in code
    assert time.process_time() - start < 10


@needs_compiler
@pytest.mark.parametrize(
    ("dim", "value_dim", "dtype"),
    [(8, None, torch.bfloat16), (72, None, torch.float16), (256, None, torch.bfloat16), (192, 128, torch.bfloat16)],
)
def test_head_dims(dim: int, value_dim: int | None, dtype: torch.dtype) -> None:
    """With e4m3 keys too. The generated source asserts that the launcher's sizes of shared memory are those of the template."""
    assert compile_variant(soft_cap(1.0), dim, dtype, value_dim=value_dim)[:4] == b"\x7fELF"
    if dim % 16 == 0 and dim < 256:
        assert compile_variant(soft_cap(1.0), dim, dtype, value_dim=value_dim, fp8=True)[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "where", "line"),
    [
        (AttentionVariant("mine", "s - slope[h]"), "mine.score(1)", "s - slope[h]"),
        (AttentionVariant("mine", "const float x = s;\nconst float y = x;\nreturn y + z;"), "mine.score(3)", "return y + z;"),
        (AttentionVariant("mine", mask="q_pos >= k_pos &&\n  k_pos > first"), "mine.mask(2)", "k_pos > first"),
        (AttentionVariant("mine", "s +", params=(Param("cap", 1.0),)), "mine.score(", "s +"),
        (AttentionVariant("mine", "return;"), "mine.score(1)", "return;"),  # a score that is whatever the register held
        (AttentionVariant("mine", mask="if (k_pos > 3)\n  return true;"), "end of non-void", "user_mask"),
        (AttentionVariant("mine", "float y;\nreturn s + y;"), "mine.score(2)", "return s + y;"),
    ],
    ids=["expression", "body", "mask", "syntax", "nothing returned", "not always returned", "never set"],
)
def test_errors_show_the_users_line(variant: AttentionVariant, where: str, line: str) -> None:
    with pytest.raises(CompileError) as error:
        compile_variant(variant, 64)
    text = str(error.value)
    assert text.startswith("variant mine does not compile for sm_90:")
    assert where in text and (line in text or where.endswith("(")), text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 60}, "dim is 60, expected a multiple of 8 up to 256"),
        ({"dim": 264}, "dim is 264"),
        ({"dim": 72, "fp8": True}, "dim is 72, expected a multiple of 16 up to 256"),
        ({"dim": 64, "value_dim": 0}, "value_dim is 0, expected"),
        ({"dim": 64, "dtype": torch.float32}, "dtype is torch.float32, expected torch.bfloat16 or torch.float16"),
        ({"dim": 64, "arch": "sm_75"}, "arch is 'sm_75', expected 'sm_80' or later"),
        ({"dim": 64, "arch": "sm_90;x"}, "arch is 'sm_90;x'"),
    ],
)
def test_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_variant(soft_cap(1.0), **arguments)  # type: ignore[arg-type]


def test_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(compiler, "importlib", SimpleNamespace(import_module=missing))
    compiler._compiler.cache_clear()
    try:
        assert "variants need cuda-python (No module named 'cuda.bindings.nvrtc')" in str(compiler.unavailable())
        with pytest.raises(RuntimeError, match="pip install cuda-core"):
            compiler._compiler()
    finally:
        compiler._compiler.cache_clear()


def test_without_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_HEADERS", ("no_such_header.h",))
    compiler.header_folder.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="cuda_fp16.h and cuda_bf16.h are in none of .*: pip install"):
            compiler.header_folder()
    finally:
        compiler.header_folder.cache_clear()
