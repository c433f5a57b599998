"""The cache of compiled code: hits, damage, races, and directories that others can write to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pyllm.jit import cache, compile_variant, compiler, use_cache
from tests.jit.examples import alibi, soft_cap
from tools.digest import ROOT

needs_compiler = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
DIGEST = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("pyllm.jit.cache._directory", [])
    use_cache(tmp_path / "a" / "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "a" / "b"


def test_what_was_stored_is_loaded(folder: Path) -> None:
    assert cache.load(DIGEST) is None
    cache.store(DIGEST, b"code")
    assert cache.load(DIGEST) == b"code"
    assert cache.load("cd" * 32) is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [p.name for p in folder.iterdir()] == [f"{DIGEST}.cubin"]
    assert stat.S_IMODE(next(folder.iterdir()).stat().st_mode) == 0o600


def test_no_cache_at_all(folder: Path) -> None:
    use_cache(None)
    cache.store(DIGEST, b"code")
    assert cache.load(DIGEST) is None
    assert not folder.exists()


@pytest.mark.parametrize("content", [b"", b"x" * 31, b"\0" * 32, b"\0" * 32 + b"code"], ids=["empty", "short", "no code", "damaged"])
def test_damaged_files_are_compiled_again(folder: Path, content: bytes) -> None:
    cache.store(DIGEST, b"code")
    (folder / f"{DIGEST}.cubin").write_bytes(content)
    assert cache.load(DIGEST) is None
    cache.store(DIGEST, b"code")
    assert cache.load(DIGEST) == b"code"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o722])
def test_a_directory_that_others_can_write_to_is_not_used(folder: Path, mode: int) -> None:
    cache.store(DIGEST, b"planted")
    folder.chmod(mode)
    with pytest.warns(RuntimeWarning, match=rf"is not used: others can write to it \(mode 0{mode:o}\)"):
        assert cache.load(DIGEST) is None
    with pytest.warns(RuntimeWarning, match="is not used"):
        cache.store("cd" * 32, b"code")
    assert len(list(folder.iterdir())) == 1


def test_a_file_that_others_can_write_to_is_not_used(folder: Path) -> None:
    cache.store(DIGEST, b"planted")
    (folder / f"{DIGEST}.cubin").chmod(0o666)
    with pytest.warns(RuntimeWarning, match=r"is not used: others can write to it \(mode 0666\)"):
        assert cache.load(DIGEST) is None
    cache.store(DIGEST, b"code")
    assert cache.load(DIGEST) == b"code"


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    cache.store(DIGEST, b"code")
    path = folder / f"{DIGEST}.cubin"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RuntimeWarning, match="is not used"):
        assert cache.load(DIGEST) is None
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    with pytest.warns(RuntimeWarning, match="is not used: it is not a directory"):
        assert cache.load(DIGEST) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_not_used(folder: Path) -> None:
    cache.store(DIGEST, b"planted")
    os.chown(folder, 12345, 12345)
    with pytest.warns(RuntimeWarning, match="is not used: it belongs to user 12345, not to 0"):
        assert cache.load(DIGEST) is None


def test_a_directory_that_cannot_be_made(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file is in the way")
    with pytest.warns(RuntimeWarning, match="is not used: .*Not a directory"):
        assert cache.load(DIGEST) is None
    with pytest.warns(RuntimeWarning, match="is not used: .*Not a directory"):
        cache.store(DIGEST, b"code")


def test_a_full_disk_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="cannot keep compiled code in .*No space left"):
        cache.store(DIGEST, b"code")
    assert list(folder.iterdir()) == []


@needs_compiler
def test_a_second_compilation_is_a_hit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile_variant(soft_cap(2.0), 64)
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_variant(soft_cap(5.0), 64) == code  # another value, the same code
    files = {p.name for p in folder.iterdir()}
    monkeypatch.setattr(compiler, "_compile", lambda *_: b"fresh")
    for variant, dim, dtype, arch in (
        (alibi(4), 64, torch.bfloat16, "sm_90"),
        (soft_cap(2.0), 72, torch.bfloat16, "sm_90"),
        (soft_cap(2.0), 64, torch.float16, "sm_90"),
        (soft_cap(2.0), 64, torch.bfloat16, "sm_80"),
    ):
        assert compile_variant(variant, dim, dtype, arch=arch) == b"fresh"
    monkeypatch.setattr(compiler, "_base_digest", lambda: "another NVRTC, other templates or headers")
    assert compile_variant(soft_cap(2.0), 64) == b"fresh"
    assert len({p.name for p in folder.iterdir()} - files) == 5


@needs_compiler
def test_processes_that_race(folder: Path) -> None:
    """Four processes compile the same variant at once: all get the same code, one file is left."""
    script = f"""
        import hashlib
        from pyllm.jit import compile_variant, use_cache
        from tests.jit.examples import soft_cap
        use_cache({str(folder)!r})
        print(hashlib.sha256(compile_variant(soft_cap(2.0), 64)).hexdigest())
    """
    command = [sys.executable, "-W", "error::RuntimeWarning:pyllm", "-c", textwrap.dedent(script)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * 4, [error for _, error in results]
    assert len({out for out, _ in results}) == 1
    assert len(list(folder.iterdir())) == 1
