"""Measure one case: ours, its baselines and a copy of the same bytes in one race; the outcome is a record."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench import ceilings, peers
from bench.case import Case, Op
from bench.ceilings import Ceilings
from bench.machine import Monitor
from bench.records import Record
from bench.shapes import Shapes
from bench.timing import ROUND_MS, ROUNDS, Contender, Timing, race, sets_for
from tools.digest import op_digest

OURS = "pyllm"
QUICK_ROUNDS, QUICK_MS = 3, 1.0
LAUNCH_FLOOR_US = 2.0  # of the floor below which no ratio goal asks
MATRIX_FLOOR = 0.95


@dataclass(frozen=True)
class Settings:
    """How a run measures."""

    against: tuple[str, ...] | None = None  # None: every baseline
    quick: bool = False

    @property
    def rounds(self) -> int:
        return QUICK_ROUNDS if self.quick else ROUNDS

    @property
    def round_ms(self) -> float:
        return QUICK_MS if self.quick else ROUND_MS


def floor_us(nbytes: int, flops: int, matrix: str | None, found: Ceilings) -> float:
    """The time below which no goal asks: bytes at the measured read rate + 2 us, or FLOPs at 0.95 of the matrix rate."""
    memory = nbytes / 1e3 / found.read_gbs + LAUNCH_FLOOR_US
    rate = {"bf16": found.bf16_tflops, "fp8": found.fp8_tflops}.get(matrix or "")
    return max(memory, flops / 1e6 / (rate * MATRIX_FLOOR)) if rate else memory


def share_of_ceiling(case: Case, us: float, copy: dict[str, Timing], found: Ceilings) -> tuple[float | None, str | None, float]:
    """(share, of what, copy time): against the fastest copy of the same bytes, or the matrix rate for a case that says so."""
    name = min(copy, key=lambda n: copy[n].us)
    if case.matrix is None:
        return copy[name].us / us, name, copy[name].us
    rate = {"bf16": found.bf16_tflops, "fp8": found.fp8_tflops}[case.matrix]
    share = None if rate is None else case.flops / us / 1e6 / rate
    return share, f"{case.matrix} matrix rate", copy[name].us


def record_of(
    op: Op,
    shapes: Shapes,
    case: Case,
    times: dict[str, Timing],
    reasons: dict[str, str],
    found: Ceilings,
    about: dict[str, Any],
    digest: Callable[[str], str] = op_digest,
) -> Record:
    """The record of a race; `about` holds the fields of the run (machine, clocks, sets, rounds)."""
    ours = times[OURS]
    copy = {name: t for name, t in times.items() if name.startswith("copy (")}
    share, of, copy_us = share_of_ceiling(case, ours.us, copy, found)
    baselines = {}
    for name in case.baselines:
        t = times.get(name)
        measured = (
            {"us": round(t.us, 3), "us_min": round(t.us_min, 3), "us_max": round(t.us_max, 3), "timer": t.timer} if t else {"us": None}
        )
        baselines[name] = {**measured, "reason": None if t else reasons[name]}
    return {
        "op": op.name,
        "family": op.family,
        "stem": op.stem,
        "shape": shapes.name,
        "case": case.name,
        "dtype": case.dtype,
        "timer": ours.timer,
        "us": round(ours.us, 3),
        "us_min": round(ours.us_min, 3),
        "us_max": round(ours.us_max, 3),
        "bytes": case.bytes,
        "flops": case.flops,
        "gbs": round(case.bytes / ours.us / 1e3, 1),
        "tflops": round(case.flops / ours.us / 1e6, 3) if case.flops else None,
        "share": None if share is None else round(share, 4),
        "share_of": of,
        "copy_us": round(copy_us, 3),
        "floor_us": round(floor_us(case.bytes, case.flops, case.matrix, found), 3),
        "baselines": baselines,
        "goal": case.goal.to_json(),
        "ceilings": found.to_json(),
        "digest": digest(op.stem),
        **about,
    }


def _contenders(case: Case, settings: Settings, sets: list[Any]) -> tuple[dict[str, Contender], dict[str, str]]:
    """What can run, and for each baseline that cannot, why."""
    work: dict[str, Callable[[Any], Any]] = {OURS: case.ours}
    reasons: dict[str, str] = {}
    for name, fn in case.baselines.items():
        asked = settings.against is None or name in settings.against
        reasons[name] = peers.try_baseline(fn, sets[0]) if asked else "not asked for"
        if not reasons[name]:
            work[name] = fn
    found = {name: Contender(fn, sets) for name, fn in work.items()}
    for name, (fn, pairs) in ceilings.copies(case.bytes, len(sets)).items():
        found[name] = Contender(fn, pairs)
    return found, reasons


def measure(
    op: Op,
    shapes: Shapes,
    case: Case,
    settings: Settings,
    found: Ceilings,
    monitor: Monitor,
    run: dict[str, Any],
    digest: Callable[[str], str] = op_digest,
) -> Record:
    """Run one case on the GPU. Errors of ours propagate; a baseline's become the text of its column."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    n, cold = sets_for(case.bytes, torch.cuda.get_device_properties("cuda").L2_cache_size)
    sets = case.make(n)
    contenders, reasons = _contenders(case, settings, sets)
    for name, contender in contenders.items():
        try:
            contender.prepare(settings.round_ms)
        except Exception as error:
            if name not in case.baselines:
                raise
            reasons[name] = f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    contenders = {name: c for name, c in contenders.items() if not reasons.get(name)}
    monitor.take()
    times = race(contenders, rounds=settings.rounds, sample=monitor.sample)
    about = {"cold": cold, "sets": n, "rounds": settings.rounds, **monitor.take(), **run}
    record = record_of(op, shapes, case, times, reasons, found, about, digest)
    del sets, contenders
    gc.collect()
    torch.cuda.empty_cache()
    return record
