"""Records of measurements: `bench/results/<family>.jsonl`, one line per (op, shape, case), newest run wins.

A record carries a digest of the kernel's sources and flags (`tools.digest.op_digest`), so that an edit to one kernel voids that
kernel's records alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.case import ROOT
from tools.digest import op_digest

Record = dict[str, Any]
RESULTS = ROOT / "bench" / "results"
WHAT = ("op", "family", "stem", "shape", "case", "dtype", "bytes", "flops", "goal", "digest")
TIMES = ("timer", "cold", "sets", "rounds", "us", "us_min", "us_max", "gbs", "tflops", "baselines")
LIMITS = ("share", "share_of", "copy_us", "floor_us", "ceilings")
MACHINE = ("sm_mhz", "sm_mhz_min", "watts", "celsius", "gpu", "driver", "torch", "cuda", "nvcc", "commit", "time", "command")
FIELDS = (*WHAT, *TIMES, *LIMITS, *MACHINE)
OTHERS = ("gpu_tests.jsonl", "serving.jsonl", "fuzz.jsonl", "load.jsonl", "soak.jsonl")
"""Files beside them with other kinds of lines: GPU tests, engines, fuzzed files, loading, soak tests."""
WORST_CELL = 0.97  # a ratio goal holds over the geometric mean of an op's cells with no cell below this


def key(record: Record) -> tuple[str, str, str]:
    return record["op"], record["shape"], record["case"]


def read_file(path: Path) -> list[Record]:
    """The records of one file; `ValueError` names the line that is not a record."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        lacking = [name for name in FIELDS if name not in record] if isinstance(record, dict) else FIELDS
        if lacking:
            raise ValueError(f"{path}:{number}: not a record, it lacks {', '.join(lacking)}")
        records.append(record)
    return records


def read(folder: Path | None = None) -> list[Record]:
    """All records of bench/results, by family file."""
    folder = folder or RESULTS
    return [record for path in sorted(folder.glob("*.jsonl")) if path.name not in OTHERS for record in read_file(path)]


def merge(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """New records take the place of old ones of the same (op, shape, case); the order is by op, then as first measured."""
    found = {key(record): record for record in old}
    found.update({key(record): record for record in new})
    return sorted(found.values(), key=lambda record: record["op"])


def write(new: Iterable[Record], folder: Path | None = None) -> list[Path]:
    """Merge into the files of their families."""
    folder = folder or RESULTS
    by_family: dict[str, list[Record]] = {}
    for record in new:
        by_family.setdefault(record["family"], []).append(record)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for family, records in by_family.items():
        path = folder / f"{family}.jsonl"
        merged = merge(read_file(path) if path.is_file() else [], records)
        lines = "".join(json.dumps({name: record[name] for name in FIELDS}) + "\n" for record in merged)
        scratch = path.with_suffix(".jsonl.new")
        scratch.write_text(lines)
        scratch.replace(path)
        paths.append(path)
    return paths


def stale(records: Iterable[Record], digest: Callable[[str], str] = op_digest) -> list[tuple[Record, str]]:
    """Records whose kernel is another one today, each with the reason."""
    today: dict[str, str] = {}
    found = []
    for record in records:
        stem = record["stem"]
        if stem not in today:
            try:
                today[stem] = digest(stem)
            except FileNotFoundError as error:
                today[stem] = str(error)
        if today[stem] != record["digest"]:
            found.append((record, f"{stem}: measured at digest {record['digest'][:12]}, now {_short(today[stem])}"))
    return found


def _short(digest: str) -> str:
    return digest[:12] if len(digest) == 64 else digest


def ratio(record: Record, baseline: str) -> float | None:
    """How many times faster than the baseline; None where it was not measured."""
    us = record["baselines"].get(baseline, {}).get("us")
    return None if us is None else us / record["us"]


def best_peer(record: Record) -> tuple[str, float] | None:
    """The fastest baseline that was measured, and the ratio to it."""
    measured = [(b["us"], name) for name, b in record["baselines"].items() if b["us"] is not None]
    return (min(measured)[1], min(measured)[0] / record["us"]) if measured else None


def _ceiling(record: Record) -> str:
    return "a copy" if record["share_of"].startswith("copy") else f"the {record['share_of']}"


def verdicts(record: Record) -> list[tuple[str, str]]:
    """Each goal of a record as (text, "met" | "missed" | "unknown"); no ratio asks for less time than the floor."""
    goal, found = record["goal"], []
    if goal["share"] is not None:
        met = "unknown" if record["share"] is None else "met" if record["share"] >= goal["share"] else "missed"
        found.append((f"{goal['share']:.0%} of {_ceiling(record)}", met))
    if goal["us"] is not None:
        found.append((f"{goal['us']:g} µs", "met" if record["us"] <= goal["us"] else "missed"))
    for name, least in goal["ratio"].items():
        us = record["baselines"][name]["us"]
        met = "unknown" if us is None else "met" if record["us"] <= max(us / least, record["floor_us"]) else "missed"
        found.append((f"{least:g}x {name}", met))
    return found


def ratio_summary(records: Iterable[Record], baseline: str) -> tuple[float, float, int] | None:
    """(geometric mean, worst, number) of the ratios to one baseline over the cells in which it was measured."""
    ratios = [r for r in (ratio(record, baseline) for record in records) if r is not None]
    if not ratios:
        return None
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), min(ratios), len(ratios)


def ratio_verdict(records: Iterable[Record], baseline: str) -> str | None:
    """Over an op's cells that state a ratio goal to `baseline`: geometric mean reached and no cell below 0.97; None without such cells.

    A cell at its floor that is behind its goal counts as having reached it.
    """
    cells = [record for record in records if baseline in record["goal"]["ratio"]]
    if not cells:
        return None
    shares = []
    for record in cells:
        got, least = ratio(record, baseline), record["goal"]["ratio"][baseline]
        if got is None:
            return "unknown"
        shares.append(max(got / least, 1.0) if record["us"] <= record["floor_us"] else got / least)
    reached = sum(map(math.log, shares)) >= 0 and min(shares) >= WORST_CELL
    return "met" if reached else "missed"
