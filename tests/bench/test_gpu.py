"""The timer, the ceilings and the runner on a real GPU: a copy measured as if it were an op must come out as a copy."""

from __future__ import annotations

import pytest
import torch

from bench import ceilings, records
from bench.case import Case, Goal, Op, PeerMissing, compiled
from bench.machine import Monitor, describe
from bench.runner import Settings, measure
from bench.shapes import SHAPES
from bench.timing import Contender, race

pytestmark = pytest.mark.gpu
BYTES = 128 << 20


def host_sync(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.view(-1)[0].item())


def absent(x: torch.Tensor) -> None:
    raise PeerMissing("not installed")


def broken(x: torch.Tensor) -> None:
    raise RuntimeError("no such kernel\nat all")


@pytest.fixture(scope="module")
def found() -> ceilings.Ceilings:
    return ceilings.measure(rounds=3)


def test_ceilings_are_in_a_plausible_order(found: ceilings.Ceilings) -> None:
    # A copy turns the bus around and cannot beat reading alone by more than noise; FP8 has twice the bf16 rate by design.
    assert 100 < found.copy_gbs < 1.05 * found.read_gbs
    assert found.read_gbs < 20_000
    assert found.bf16_tflops > 50
    assert found.fp8_tflops is None or found.fp8_tflops > 1.2 * found.bf16_tflops


def test_a_copy_measured_as_an_op_is_a_copy(found: ceilings.Ceilings) -> None:
    case = Case(
        name="copy",
        dtype="bf16",
        bytes=BYTES,
        make=lambda n: [torch.randn(BYTES // 4, device="cuda", dtype=torch.bfloat16) for _ in range(n)],
        ours=torch.clone,
        baselines={
            "torch": torch.clone,
            "torch.compile": compiled(lambda x: x + 1),
            "sync": host_sync,
            "vllm": absent,
            "broken": broken,
        },
        goal=Goal(share=0.5, ratio={"vllm": 1.0}),
    )
    monitor = Monitor()
    record = measure(
        Op("fused", "act_mul"), SHAPES["default"], case, Settings(), found, monitor, describe(monitor, "test"), digest=lambda stem: "none"
    )
    assert set(record) == set(records.FIELDS)
    assert 0.85 < record["share"] < 1.15
    assert 0.9 < records.ratio(record, "torch") < 1.1
    assert record["baselines"]["torch.compile"]["timer"] == "graph"
    assert record["baselines"]["sync"]["timer"] == "events"
    assert record["baselines"]["vllm"] == {"us": None, "reason": "not installed"}
    assert record["baselines"]["broken"]["reason"] == "failed: RuntimeError: no such kernel"
    assert [verdict for _, verdict in records.verdicts(record)] == ["met", "unknown"]
    assert record["us_min"] <= record["us"] <= record["us_max"]


def test_twice_the_work_takes_twice_the_time() -> None:
    sets = [torch.randn(BYTES // 4, device="cuda") for _ in range(3)]
    contenders = {"one": Contender(lambda x: x.mul_(1.0), sets), "two": Contender(lambda x: x.mul_(1.0).mul_(1.0), sets)}
    for contender in contenders.values():
        contender.prepare(3.0)
    times = race(contenders, rounds=5)
    assert times["two"].us / times["one"].us == pytest.approx(2.0, rel=0.1)


def test_short_work_is_timed_without_the_cost_of_launches() -> None:
    # Launched one by one from Python an add of 4 KB takes 5 us or more; inside a graph it is bound by the GPU alone.
    contender = Contender(lambda x: x + 1, [torch.randn(1024, device="cuda") for _ in range(4)])
    contender.prepare(3.0)
    assert contender.timer == "graph"
    assert race({"add": contender}, rounds=5)["add"].us < 4.0


@pytest.mark.skipif(bool(ceilings.cupy_missing()) if torch.cuda.is_available() else False, reason="CuPy is not installed")
def test_the_cupy_copy_copies() -> None:
    for n in (16, 16 * 7, 16 * 513, 16 * 1_000_003):
        source, target = torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda"), torch.zeros(n, dtype=torch.uint8, device="cuda")
        ceilings.cupy_copy((source, target))
        assert torch.equal(source, target)
