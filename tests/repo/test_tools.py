"""The scripts behind `make gpu-test` and the environment that `make` sets up, as far as they can be tried without a GPU or a network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tools import gpu_tests, setup_env
from tools.digest import ROOT

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.norm.test_rms_norm" name="a"/>
<testcase classname="tests.norm.test_rms_norm.TestBig" name="b"><failure message="x"/></testcase>
<testcase classname="tests.norm.test_rms_norm" name="c"><skipped/></testcase>
<testcase classname="tests.norm.test_layer_norm" name="d"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tests/norm").mkdir(parents=True)
    (tmp_path / "tests/norm/test_rms_norm.py").write_text("@pytest.mark." + "gpu\ndef test_a(): ...\n")
    (tmp_path / "tests/norm/test_layer_norm.py").write_text("def test_d(): ...\n")
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "RESULTS", tmp_path / "results" / "gpu_tests.jsonl")
    return tmp_path


def test_junit_counts_per_file(repository: Path) -> None:
    report = repository / "report.xml"
    report.write_text(JUNIT)
    assert gpu_tests.counts(report) == {
        "tests/norm/test_rms_norm.py": {"passed": 1, "failed": 1, "skipped": 1},
        "tests/norm/test_layer_norm.py": {"passed": 0, "failed": 1, "skipped": 0},
    }


def test_only_files_with_gpu_tests_run(repository: Path) -> None:
    assert gpu_tests.gpu_files(["tests"]) == ["tests/norm/test_rms_norm.py"]
    with pytest.raises(SystemExit, match="tests/none does not exist"):
        gpu_tests.gpu_files(["tests/none"])


def test_no_file_with_gpu_tests_is_left_out() -> None:
    """A file whose tests have the mark through parameters of another module was."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    collected = sorted({line.split("::")[0] for line in lines if "::" in line})
    assert len(collected) > 40
    assert gpu_tests.gpu_files(["tests"]) == collected


def test_records_replace_those_of_the_same_file_and_tool(repository: Path) -> None:
    one, two = "tests/norm/test_rms_norm.py", "tests/norm/test_layer_norm.py"
    gpu_tests.record([{"file": one, "tool": "pytest", "passed": 1}, {"file": two, "tool": "pytest", "passed": 2}])
    gpu_tests.record([{"file": one, "tool": "memcheck", "passed": 3}])
    gpu_tests.record([{"file": one, "tool": "pytest", "passed": 4}])
    (repository / two).unlink()
    gpu_tests.record([])
    lines = [json.loads(line) for line in gpu_tests.RESULTS.read_text().splitlines()]
    assert lines == [{"file": one, "tool": "memcheck", "passed": 3}, {"file": one, "tool": "pytest", "passed": 4}]


def test_a_run_that_is_cut_short_reports_what_has_run(repository: Path) -> None:
    test = repository / "tests/norm/test_slow.py"
    test.write_text("import pathlib, time\ndef test_a(): ...\ndef test_b():\n    pathlib.Path('began').touch()\n    time.sleep(60)\n")
    before = signal.signal(signal.SIGTERM, gpu_tests.interrupt)

    def end() -> None:
        while not (repository / "began").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        code, by_file, _ = gpu_tests.run_pytest([], ["-p", "no:cacheprovider", str(test)], {})
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert code == 2  # pytest's code for an interrupted run
    assert by_file["tests/norm/test_slow.py"]["passed"] == 1


def test_setup_reads_pyproject_as_toml_does() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((setup_env.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert setup_env.requirements("dependencies") == project["dependencies"]
    for group, wanted in project["optional-dependencies"].items():
        assert setup_env.requirements(group) == wanted


def test_missing_names_what_is_absent_or_too_old() -> None:
    assert setup_env.missing(sys.executable, ["torch>=2.10", "pytest>=8,<10"]) == []
    wanted = ["torch>=99", "no-such-distribution-of-anyone>=1"]
    assert setup_env.missing(sys.executable, wanted) == wanted


def test_a_complete_python_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "VENV", tmp_path / ".venv")
    assert setup_env.choose(["torch>=2.10"]) == sys.executable
    assert not (tmp_path / ".venv").exists()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert setup_env.choose(["torch>=2.10"]) == str(tmp_path / ".venv/bin/python")
