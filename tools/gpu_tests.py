"""Runs the GPU tests and records what passed where: one line per test file in bench/results/gpu_tests.jsonl.

    python -m tools.gpu_tests [--sanitizer memcheck|racecheck|synccheck|initcheck] [--jobs N] [tests/norm ...]

Tests run in --jobs processes (through pytest-xdist, where it is installed). With --sanitizer, each file runs by itself under
NVIDIA's compute-sanitizer, kernels of pyllm alone, a few parameter sets of each test function, without the tests marked `large` and
those of CUDA graphs and torch.compile: memcheck needs torch's caching allocator off (inside a cached block every address is valid),
and without it nothing can be allocated while a graph is captured.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.digest import ROOT, csrc_digest

RESULTS = ROOT / "bench" / "results" / "gpu_tests.jsonl"
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
SMALL = ["-m", "gpu and not large", "-k", "not graph and not compile", "--per-function", "4"]
SANITIZER_FOUND = 86  # an exit code that pytest never uses
MARKED = re.compile(r"mark\.gpu|\bDEVICES\b")  # a mark, or parameters that have it (tests/support)
RUNNING: set[subprocess.Popen[bytes]] = set()


def interrupt(*_: object) -> None:
    """SIGTERM, as a time limit sends it, becomes what Ctrl-C is to pytest: it ends and reports what has run, and that is recorded."""
    for process in tuple(RUNNING):
        process.send_signal(signal.SIGINT)


def gpu_files(targets: list[str]) -> list[str]:
    """The test files that hold a GPU test, from the targets (files or folders)."""
    found: set[Path] = set()
    for target in targets:
        path = ROOT / target
        if not path.exists():
            raise SystemExit(f"gpu_tests: {target} does not exist")
        found |= {path} if path.is_file() else set(path.rglob("test_*.py"))
    return sorted(str(p.relative_to(ROOT)) for p in found if MARKED.search(p.read_text(encoding="utf-8")))


def machine() -> dict[str, Any]:
    """GPU, clocks and power (as nvidia-smi reads them now), torch and commit; null for what cannot be read."""
    import torch

    fields = ("clocks.sm", "clocks.mem", "power.draw", "driver_version")
    values = output("nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    read = dict(zip(fields, (v.strip() for v in values.split(",")), strict=True)) if values and values.count(",") == 3 else {}
    return {
        "gpu": torch.cuda.get_device_name(),
        "sm_mhz": read.get("clocks.sm"),
        "mem_mhz": read.get("clocks.mem"),
        "watts": read.get("power.draw"),
        "driver": read.get("driver_version"),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": output("git", "rev-parse", "HEAD"),
        "csrc": csrc_digest(),
    }


def output(*command: str) -> str | None:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def counts(report: Path) -> dict[str, dict[str, int]]:
    """test file -> how many passed, failed, skipped, from pytest's JUnit report."""
    files: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        parts = case.get("classname", "").split(".")
        while parts and not (ROOT / Path(*parts)).with_suffix(".py").is_file():
            parts.pop()  # a test class
        file = Path(*parts).with_suffix(".py").as_posix() if parts else case.get("classname", "?")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        files.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0})[outcome] += 1
    return files


def sanitizer_command(tool: str) -> list[str]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).is_file():
        raise SystemExit("gpu_tests: compute-sanitizer is neither on the path nor in /usr/local/cuda/bin")
    # synccheck follows so many barriers and, when there are more, ends the launch with an error.
    barriers = ["--num-cuda-barriers", "65536"] if tool == "synccheck" else []
    return [
        program,
        "--tool",
        tool,
        *barriers,
        "--kernel-name",
        "kns=pyllm",
        "--report-api-errors",
        "no",
        "--error-exitcode",
        str(SANITIZER_FOUND),
    ]


def run_pytest(prefix: list[str], arguments: list[str], environment: dict[str, str]) -> tuple[int, dict[str, dict[str, int]], str]:
    report = ROOT / "build" / f"gpu_tests_{zlib.crc32(' '.join(arguments).encode()):08x}.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    command = [*prefix, sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment})
    RUNNING.add(process)
    try:
        code = process.wait()
    finally:
        RUNNING.discard(process)
    shown = " ".join(["python" if part == sys.executable else Path(part).name if part in prefix[:1] else part for part in command])
    return code, counts(report) if report.exists() else {}, shown.replace(f"{ROOT}/", "")


def record(lines: list[dict[str, Any]]) -> None:
    """New lines replace older ones of the same file and tool; lines of files that are gone go."""
    old = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.exists() else []
    fresh = {(line["file"], line["tool"]) for line in lines}
    kept = [line for line in old if (line["file"], line["tool"]) not in fresh and (ROOT / line["file"]).exists()]
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in sorted(kept + lines, key=lambda r: (r["tool"], r["file"])))
    RESULTS.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="run the GPU tests and record the outcome")
    parser.add_argument("targets", nargs="*", default=["tests"], help="test files or folders")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--sanitizer", choices=SANITIZERS, help="run each file under this tool of compute-sanitizer")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"gpu_tests: torch {torch.__version__} sees no CUDA device")
    files = gpu_files(options.targets)
    if not files:
        raise SystemExit(f"gpu_tests: no GPU test in {' '.join(options.targets)}")
    tool = options.sanitizer or "pytest"
    parallel = ["-n", str(options.jobs)] if options.jobs > 1 and importlib.util.find_spec("xdist") else []

    def run(batch: list[str]) -> tuple[int, list[dict[str, Any]]]:
        started = time.time()
        prefix = sanitizer_command(tool) if options.sanitizer else []
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if options.sanitizer else {}
        code, by_file, shown = run_pytest(prefix, [*(SMALL if options.sanitizer else ["-m", "gpu", *parallel]), *batch], environment)
        if code not in (0, 1, 5, SANITIZER_FOUND) or (code == SANITIZER_FOUND and not by_file):  # pytest itself did not get to its end
            by_file = {file: {"passed": 0, "failed": 0, "skipped": 0} for file in batch} | by_file
        common = {"tool": tool, "exit": code, "command": shown, "seconds": round(time.time() - started), **machine()}
        return 0 if code == 5 else code, [{"file": file, **result, **common} for file, result in by_file.items()]

    worst, lines = 0, []
    signal.signal(signal.SIGTERM, interrupt)
    with ThreadPoolExecutor(options.jobs if options.sanitizer else 1) as pool:
        for code, found in pool.map(run, [[file] for file in files] if options.sanitizer else [files]):
            worst = max(worst, code)  # 5, nothing left of a file, came as 0
            lines += found
            record(lines)
    return worst


if __name__ == "__main__":
    sys.exit(main())
