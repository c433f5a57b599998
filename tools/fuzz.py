"""Feeds the loaders with mutated files and records what happened in bench/results/fuzz.jsonl: one line per kind of file.

    python -m tools.fuzz [--files 1000000] [--seed 1] [--only gguf ...] [--engine atheris|mutator] [--record]

Each kind runs in a process of its own, one after the other: with atheris (coverage-guided, where it is installed: pip install atheris,
Python 3.11 or later), otherwise with a mutator of bytes without guidance. A file that raises anything but the promised error, takes more
than 20 seconds, makes the process grow by more than half a gigabyte, or gives a tensor that another reader does not, ends the run;
it is kept in build/fuzz/<kind>/ and named.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.digest import ROOT

RESULTS = ROOT / "bench" / "results" / "fuzz.jsonl"
WORK = ROOT / "build" / "fuzz"
SECONDS = 20  # a template may take 5 of them by its own budget; under this much load of the machine they stretch
GROWTH = 512 << 20
MAX_LENGTH = 4096
NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    127,
    128,
    255,
    256,
    65535,
    1 << 20,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
WORDS = (
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"1e400", b"NaN", b"\\u0000", b"..", b"/", b"\xff", b"{{", b"}}",
    b"{% for i in range(9**9) %}", b"{% endfor %}", b"|tojson", b"*", b"(a+)+", b'{"Regex":"', b"__metadata__", b"model.safetensors",
)  # fmt: skip


def mutate(data: bytes, other: bytes, r: random.Random) -> bytes:
    """One to eight changes: bytes, bits, whole integers, words of the formats, pieces taken out, doubled, or from another file."""
    raw = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 2, 3, 5, 8))):
        at = r.randrange(len(raw) + 1)
        kind = r.randrange(8)
        if kind == 0 and raw:
            raw[at - 1] = r.randrange(256)
        elif kind == 1 and raw:
            raw[at - 1] ^= 1 << r.randrange(8)
        elif kind == 2:
            size = r.choice((4, 8))
            raw[at : at + size] = (r.choice(NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        elif kind == 3:
            raw[at:at] = r.choice(WORDS)
        elif kind == 4:
            del raw[at : at + r.choice((1, 2, 4, 8, 64))]
        elif kind == 5:
            end = at + r.choice((1, 8, 32, 128))
            raw[at:at] = raw[at:end]
        elif kind == 6:
            raw[at : at + r.randrange(9)] = str(r.choice(NUMBERS)).encode()
        elif other:
            start = r.randrange(len(other))
            raw[at : at + r.randrange(64)] = other[start : start + r.randrange(64)]
    return bytes(raw[:MAX_LENGTH])


class Counter:
    """Runs a target and keeps count; the counts are on disk before the process ends, however it ends."""

    def __init__(self, run: Callable[[bytes], bool], files: int, out: Path) -> None:
        self.run, self.files, self.out = run, files, out
        self.done = self.accepted = 0
        self.started = time.monotonic()

    def __call__(self, data: bytes) -> bool:
        accepted = self.run(data)
        self.done += 1
        self.accepted += accepted
        if self.done % 1000 == 0 or self.done >= self.files:
            self.write()
        return accepted

    def write(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        seconds = round(time.monotonic() - self.started, 1)
        self.out.write_text(json.dumps({"files": self.done, "accepted": self.accepted, "seconds": seconds, "peak_mib": peak}))


def limit_memory() -> None:
    """No more than half a gigabyte beyond what the process has mapped by now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + GROWTH, resource.RLIM_INFINITY))


def work_mutator(name: str, files: int, seed: int) -> None:
    from tools.fuzz_seeds import seeds
    from tools.fuzz_targets import TARGETS, Files

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"a file took more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, too_long)
    r, pool, folder = random.Random(f"{name} {seed}"), seeds(name), WORK / name
    count = Counter(TARGETS[name][0](Files()), files, folder / "stats.json")
    for data in pool:
        count(data)
    limit_memory()
    while count.done < files:
        data = mutate(r.choice(pool), r.choice(pool), r)
        signal.alarm(SECONDS)
        try:
            if count(data) and len(pool) < 200:
                pool.append(data)
        except BaseException:
            (folder / "crash").write_bytes(data)
            raise
        finally:
            signal.alarm(0)


def work_atheris(name: str, files: int, seed: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["pyllm.load", "pyllm.models"]):
        from tools.fuzz_targets import TARGETS, Files
    from tools.fuzz_seeds import seeds

    folder = WORK / name
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    count = Counter(TARGETS[name][0](Files()), files, folder / "stats.json")
    for i, data in enumerate(seeds(name)):
        (corpus / f"seed-{i}").write_bytes(data)
        count.run(data)
    words = folder / "words"
    words.write_text("".join('"' + "".join(f"\\x{b:02x}" for b in word) + '"\n' for word in WORDS))
    limit_memory()
    options = [f"-runs={files}", f"-seed={seed}", f"-max_len={MAX_LENGTH}", f"-timeout={SECONDS}", f"-dict={words}", "-len_control=0"]
    rss = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) + (GROWTH >> 20)
    options += [f"-rss_limit_mb={rss}", f"-artifact_prefix={folder}/", "-print_final_stats=0", "-verbosity=0"]

    def one(data: bytes) -> None:
        count(data)

    atheris.Setup([name, *options, str(corpus)], one)
    atheris.Fuzz()


def run_one(name: str, files: int, seed: int, engine: str) -> dict[str, Any]:
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tools.fuzz", "--worker", name, "--files", str(files), "--seed", str(seed), "--engine", engine]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
    stats_file = folder / "stats.json"
    stats = json.loads(stats_file.read_text()) if stats_file.exists() else {"files": 0, "accepted": 0, "seconds": 0.0, "peak_mib": 0}
    kept = sorted(p.name for p in folder.iterdir() if p.name.startswith(("crash", "timeout", "oom", "slow-unit", "leak")))
    good = done.returncode == 0 and stats["files"] >= files and not kept
    outcome = (
        "no crash, hang, over-allocation or wrong tensor" if good else f"failed ({done.returncode}): {', '.join(kept) or 'no file kept'}"
    )
    if not good:
        print(done.stdout[-2000:] + done.stderr[-4000:], file=sys.stderr)
    return {"target": name, "engine": engine, **stats, "seed": seed, "outcome": outcome}


def sources() -> str:
    """A digest of the loaders that were fuzzed."""
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "pyllm" / "load").glob("*.py")))
    return hashlib.sha256(text).hexdigest()[:16]


def record(lines: list[dict[str, Any]]) -> None:
    """New lines replace older ones of the same kind of file."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    about = {"python": sys.version.split()[0], "sources": sources(), "commit": commit, "time": time.strftime("%Y-%m-%d %H:%M")}
    old = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    fresh = {line["target"] for line in lines}
    kept = [line for line in old if line["target"] not in fresh] + [line | about for line in lines]
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in sorted(kept, key=lambda line: line["target"])))


def main() -> int:
    from tools.fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(description="feed the loaders with mutated files")
    parser.add_argument("--files", type=int, default=1_000_000, help="mutated files over all kinds (default 1000000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(TARGETS), help="these kinds alone, each with its share of --files")
    parser.add_argument("--engine", choices=("atheris", "mutator"), help="default: atheris where it is installed")
    parser.add_argument("--record", action="store_true", help="write bench/results/fuzz.jsonl")
    parser.add_argument("--worker", choices=list(TARGETS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    installed = importlib.util.find_spec("atheris") is not None
    engine = options.engine or ("atheris" if installed else "mutator")
    if engine == "mutator" and options.engine is None:
        print("fuzz: atheris is not installed (pip install atheris; Python 3.11 or later): mutating without coverage")
    lines = []
    for name in options.only or TARGETS:
        line = run_one(name, max(options.files * TARGETS[name][1] // 100, 1), options.seed, engine)
        print(f"{name:<12} {line['files']:>8} files, {line['accepted']:>7} accepted, {line['seconds']:>7} s, {line['outcome']}", flush=True)
        lines.append(line)
    if options.record:
        record(lines)
    return int(any(line["outcome"].startswith("failed") for line in lines))


if __name__ == "__main__":
    if "--worker" in sys.argv:  # before anything that atheris is to instrument is imported
        at = {key: sys.argv[sys.argv.index(f"--{key}") + 1] for key in ("worker", "files", "seed", "engine")}
        (work_atheris if at["engine"] == "atheris" else work_mutator)(at["worker"], int(at["files"]), int(at["seed"]))
        sys.exit(0)
    sys.exit(main())
