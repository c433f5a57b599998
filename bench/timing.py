"""The one timer: contenders captured in CUDA graphs over rotating input sets, replayed in alternating order, the median of rounds.

Events around single launches add ~5 us to anything short, so a contender is a graph of many calls, and the events stand around
several replays of it, behind one replay that hides the launch of the first. A contender that cannot be captured (host sync inside)
is timed by events around eager calls and says so.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

COLD_BYTES = 180_000_000  # 3x the 60 MB L2 of an H200: no set survives in L2 until its next turn
WARM_LIMIT = 1_000_000  # below this many bytes the sets stay in L2, as after the kernel that produced them
WARM_SETS = 4
MAX_SETS = 192
ROUNDS = 7
ROUND_MS = 3.0  # GPU time per contender and round
MAX_CALLS = 512  # per graph


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the rounds."""

    us: float
    us_min: float
    us_max: float
    timer: str  # "graph" or "events"

    @property
    def spread(self) -> float:
        """(max - min) / median."""
        return (self.us_max - self.us_min) / self.us


def sets_for(nbytes: int, l2_bytes: int = COLD_BYTES // 3) -> tuple[int, bool]:
    """How many input sets to rotate over for a case of nbytes, and whether that makes L2 cold."""
    if nbytes < WARM_LIMIT:
        return WARM_SETS, False
    return min(MAX_SETS, max(2, math.ceil(max(COLD_BYTES, 3 * l2_bytes) / nbytes) + 1)), True


def summarise(samples: Sequence[float], timer: str) -> Timing:
    return Timing(statistics.median(samples), min(samples), max(samples), timer)


def order_of(round_index: int, names: Sequence[str]) -> list[str]:
    """Forward in even rounds, backward in odd ones, so that no contender always follows the same one or the clock's drift."""
    return list(names) if round_index % 2 == 0 else list(reversed(names))


class Contender:
    """One function to time over the sets. `prepare` warms it up and captures it; `enqueue` starts one timed round."""

    def __init__(self, fn: Callable[[Any], Any], sets: Sequence[Any]) -> None:
        self.fn, self.sets = fn, sets
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = len(sets)
        self.repeats = 1
        self._kept: deque[Any] = deque(maxlen=len(sets))

    def prepare(self, round_ms: float) -> None:
        for _ in range(2):
            self._run(len(self.sets))
        torch.cuda.synchronize()
        estimate = self._time(lambda: self._run(len(self.sets))) / len(self.sets)
        self._size(estimate, round_ms)
        if not self._host_syncs() and self._capture():
            # Events over eager calls see the host's pace in short work, so the graph is sized again from its own first replay.
            before = self.calls
            self._size(self._time(self._once) / before, round_ms)
            if self.calls != before:
                self._capture()
        self._kept.clear()

    def enqueue(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._once()
        start.record()
        for _ in range(self.repeats):
            self._once()
        end.record()
        return start, end

    def us_per_call(self, events: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
        return events[0].elapsed_time(events[1]) * 1e3 / (self.calls * self.repeats)

    @property
    def timer(self) -> str:
        return "graph" if self.graph is not None else "events"

    def _run(self, calls: int) -> None:
        # Results of the last len(sets) calls stay alive, so that the allocator hands out as many output buffers as there are input sets.
        for i in range(calls):
            self._kept.append(self.fn(self.sets[i % len(self.sets)]))

    def _once(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            self._run(self.calls)

    def _size(self, us: float, round_ms: float) -> None:
        wanted = max(1.0, round_ms * 1e3 / max(us, 0.1))
        turns = max(1, math.ceil(min(wanted, MAX_CALLS) / len(self.sets)))
        self.calls = turns * len(self.sets)
        self.repeats = max(1, round(wanted / self.calls))

    def _host_syncs(self) -> bool:
        """A host sync during a capture breaks it and may leave torch's allocator behind in it, so look for one before."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._run(1)
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return False

    def _capture(self) -> bool:
        self.graph = None
        self._kept.clear()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._run(self.calls)
        except RuntimeError:
            self._kept.clear()
            torch.cuda.synchronize()
            return False
        self.graph = graph
        graph.replay()
        torch.cuda.synchronize()
        return True

    @staticmethod
    def _time(work: Callable[[], None]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3


def race(contenders: Mapping[str, Contender], *, rounds: int = ROUNDS, sample: Callable[[], None] = lambda: None) -> dict[str, Timing]:
    """Time prepared contenders interleaved; `sample` is called while the GPU works (clocks, power)."""
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in order_of(index, names):
            events = contenders[name].enqueue()
            sample()
            torch.cuda.synchronize()
            samples[name].append(contenders[name].us_per_call(events))
    return {name: summarise(samples[name], contenders[name].timer) for name in names}
