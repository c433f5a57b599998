"""What a bench file declares (`Case`), and finding the bench files: `bench/<family>/bench_<op>.py`, each with `cases(shapes)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.shapes import Shapes

ROOT = Path(__file__).resolve().parent.parent
MATRIX_CEILINGS = (None, "bf16", "fp8")


class PeerMissing(RuntimeError):
    """A baseline cannot run here; the message ("not installed", "incompatible: ...") is what its column shows."""


@dataclass(frozen=True)
class Goal:
    """What an op is to reach; each field that is set is judged by itself.

    share: of the time of a copy of the same bytes (of the matrix rate where `Case.matrix` is set).
    us: time per call inside a CUDA graph.
    ratio: baseline name -> least speed-up over it.
    """

    share: float | None = None
    us: float | None = None
    ratio: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"share": self.share, "us": self.us, "ratio": dict(self.ratio)}


@dataclass(frozen=True)
class Case:
    """One measurement: an op at one shape.

    name: unique inside (op, shapes), with everything that distinguishes it.
    bytes: the fewest bytes through device memory: each input read once, each output written once.
    make: make(n) -> n input sets on the GPU (random normal data); what the sets share is built once inside.
    ours, baselines: set -> outputs (returned, so that the timer can keep them alive and rotate them too).
    flops: arithmetic operations, 0 where they do not matter.
    matrix: "bf16" or "fp8" where the ceiling is the matrix rate instead of a copy of the same bytes.
    """

    name: str
    dtype: str
    bytes: int
    make: Callable[[int], list[Any]]
    ours: Callable[[Any], Any]
    baselines: Mapping[str, Callable[[Any], Any]]
    flops: int = 0
    matrix: str | None = None
    goal: Goal = field(default_factory=Goal)

    def __post_init__(self) -> None:
        if self.bytes <= 0 or self.flops < 0:
            raise ValueError(f"Case {self.name!r}: bytes is {self.bytes} and flops {self.flops}, expected bytes > 0 and flops >= 0")
        if self.matrix not in MATRIX_CEILINGS:
            raise ValueError(f"Case {self.name!r}: matrix is {self.matrix!r}, expected one of {MATRIX_CEILINGS}")
        if self.matrix and not self.flops:
            raise ValueError(f"Case {self.name!r}: matrix is {self.matrix!r} but flops is 0")
        unknown = set(self.goal.ratio) - set(self.baselines)
        if unknown:
            raise ValueError(f"Case {self.name!r}: goal.ratio names {sorted(unknown)}, expected baselines {sorted(self.baselines)}")


def compiled(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`torch.compile(fn)` for static shapes, made at the first call, so that declaring a case stays cheap."""
    ready: list[Callable[[Any], Any]] = []

    def call(inputs: Any) -> Any:
        if not ready:
            import torch

            ready.append(torch.compile(fn, dynamic=False, fullgraph=True))
        return ready[0](inputs)

    return call


@dataclass(frozen=True)
class Op:
    """One bench file."""

    family: str
    name: str

    @property
    def stem(self) -> str:
        return f"{self.family}/{self.name}"

    def cases(self, shapes: Shapes) -> list[Case]:
        found = list(importlib.import_module(f"bench.{self.family}.bench_{self.name}").cases(shapes))
        names = [case.name for case in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"bench/{self.family}/bench_{self.name}.py: case names are not unique: {', '.join(twice)}")
        return found


def all_ops(root: Path = ROOT) -> list[Op]:
    """Every op that has a bench file, sorted by family and name."""
    files = sorted((root / "bench").glob("*/bench_*.py"))
    return [Op(path.parent.name, path.stem.removeprefix("bench_")) for path in files]


def select(names: list[str], ops: list[Op]) -> list[Op]:
    """The ops that `names` mean: a family ("fused"), an op ("act_mul") or a stem ("fused/act_mul"); none means all."""
    if not names:
        return ops
    unknown = [n for n in names if not any(n in (op.family, op.name, op.stem) for op in ops)]
    if unknown:
        known = sorted({op.family for op in ops}) + [op.name for op in ops]
        raise ValueError(f"bench: no family or op named {', '.join(map(repr, unknown))}; there are {', '.join(known) or 'none yet'}")
    return [op for op in ops if any(n in (op.family, op.name, op.stem) for n in names)]
