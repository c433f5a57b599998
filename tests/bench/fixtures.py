"""Made-up cases and records for the tests of the bench's own logic; no GPU and no real op behind them."""

from __future__ import annotations

from typing import Any

from bench.case import Case, Goal, Op
from bench.ceilings import Ceilings
from bench.records import Record
from bench.runner import OURS, record_of
from bench.shapes import SHAPES
from bench.timing import Timing

CEILINGS = Ceilings(copy_gbs=4270.0, read_gbs=4600.0, write_gbs=3300.0, bf16_tflops=776.0, fp8_tflops=1370.0)
RUN: dict[str, Any] = {
    "cold": True,
    "sets": 3,
    "rounds": 7,
    "sm_mhz": 1755,
    "sm_mhz_min": 1700,
    "watts": 512,
    "celsius": 55,
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "cuda": "13.0",
    "nvcc": "13.0.48",
    "commit": "0123456789ab",
    "time": "2026-01-02T03:04:05Z",
    "command": "python -m bench made_up",
}


def timing(us: float, timer: str = "graph") -> Timing:
    return Timing(us, us * 0.99, us * 1.02, timer)


def case(
    name: str = "T=8192 F=4096 bf16", nbytes: int = 201_326_592, flops: int = 0, matrix: str | None = None, goal: Goal | None = None
) -> Case:
    baselines = {"torch": len, "vllm": len}
    return Case(name, "bf16", nbytes, lambda n: [0] * n, len, baselines, flops=flops, matrix=matrix, goal=goal or Goal(share=0.95))


def record(
    us: float = 48.0, *, op: str = "made_up", vllm: float | str = 50.0, torch: float | str = 110.0, digest: str = "d" * 64, **change: Any
) -> Record:
    """A record as the runner makes it; a text instead of a time is the reason why the baseline was not measured."""
    the_case = case(**{k: change.pop(k) for k in ("name", "nbytes", "flops", "matrix", "goal") if k in change})
    times = {OURS: timing(us), "copy (torch)": timing(48.0), "copy (cupy)": timing(47.0)}
    reasons = {}
    for name, value in (("torch", torch), ("vllm", vllm)):
        if isinstance(value, str):
            reasons[name] = value
        else:
            times[name] = timing(value)
    found = record_of(Op("fused", op), SHAPES["default"], the_case, times, reasons, CEILINGS, RUN, digest=lambda stem: digest)
    return {**found, **change}
