"""A run from the command line to the page with the GPU replaced by a made-up clock: what is measured, recorded, shown and survived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import __main__ as cli
from bench import ceilings, machine, records, results_page, runner
from bench.case import Case, Goal, Op, PeerMissing
from bench.runner import Settings
from bench.shapes import SHAPES
from tests.bench.fixtures import CEILINGS, RUN, timing

MICROSECONDS = {"pyllm": 50.0, "torch": 100.0, "copy (torch)": 48.0, "copy (cupy)": 49.0}


class FakeContender:
    def __init__(self, fn: Callable[[Any], Any], sets: list[Any]) -> None:
        self.fn, self.sets = fn, sets

    def prepare(self, round_ms: float) -> None:
        self.fn(self.sets[0])
        if len(self.sets) > 1:
            self.fn(self.sets[1])


def fake_race(contenders: Mapping[str, FakeContender], *, rounds: int, sample: Callable[[], None]) -> dict[str, Any]:
    sample()
    return {name: timing(MICROSECONDS[name]) for name in contenders}


class FakeMonitor:
    reason = "clocks and power not logged: no GPU"

    def sample(self) -> None:
        pass

    def take(self) -> dict[str, Any]:
        return {"sm_mhz": None, "sm_mhz_min": None, "watts": None, "celsius": None}


def missing(_: Any) -> None:
    raise PeerMissing("not installed")


def fails_on_the_second_set(x: int) -> None:
    if x == 1:
        raise ValueError("second")


def broken(_: Any) -> None:
    raise RuntimeError("ours is broken")


def case(name: str = "T=1", ours: Callable[[Any], Any] = abs) -> Case:
    baselines = {"torch": abs, "vllm": missing, "flaky": fails_on_the_second_set}
    return Case(name, "bf16", 200_000_000, lambda n: list(range(n)), ours, baselines, goal=Goal(share=0.95, ratio={"vllm": 1.0}))


@pytest.fixture(autouse=True)
def made_up_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "Contender", FakeContender)
    monkeypatch.setattr(runner, "race", fake_race)
    monkeypatch.setattr(ceilings, "copies", lambda nbytes, n: {f"copy ({w})": (abs, list(range(n))) for w in ("torch", "cupy")})
    monkeypatch.setattr(ceilings, "measure", lambda: CEILINGS)
    monkeypatch.setattr(machine, "Monitor", lambda device: FakeMonitor())
    monkeypatch.setattr(machine, "describe", lambda monitor, command: {k: RUN[k] for k in records.MACHINE[4:]} | {"command": command})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=60 << 20))
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "docs" / "results.md")
    monkeypatch.setattr("bench.serving.RESULTS", tmp_path / "serving.jsonl")


def measured(settings: Settings) -> records.Record:
    run = {k: RUN[k] for k in records.MACHINE[4:]}
    return runner.measure(Op("fused", "made_up"), SHAPES["default"], case(), settings, CEILINGS, FakeMonitor(), run, lambda stem: "d" * 64)


def test_the_record_of_a_case_with_absent_and_failing_baselines() -> None:
    record = measured(Settings())
    assert set(record) == set(records.FIELDS)
    assert (record["us"], record["share"], record["share_of"]) == (50.0, 0.96, "copy (torch)")
    assert (record["sets"], record["cold"], record["rounds"]) == (2, True, 7)
    assert record["baselines"]["torch"]["us"] == 100.0
    assert record["baselines"]["vllm"] == {"us": None, "reason": "not installed"}
    assert record["baselines"]["flaky"] == {"us": None, "reason": "failed: ValueError: second"}


def test_a_baseline_that_is_not_asked_for_stays_in_the_record() -> None:
    record = measured(Settings(against=("vllm",), quick=True))
    assert record["baselines"]["torch"] == {"us": None, "reason": "not asked for"}
    assert record["rounds"] == 3


def run_cli(monkeypatch: pytest.MonkeyPatch, cases: list[Case], argv: list[str]) -> int:
    op = Op("fused", "made_up")
    monkeypatch.setattr(cli, "all_ops", lambda: [op])
    monkeypatch.setattr(Op, "cases", lambda self, shapes: cases)
    return cli.main(argv)


def test_a_run_prints_records_and_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_cli(monkeypatch, [case()], ["made_up", "--shapes", "llama3-8b"]) == 0
    out = capsys.readouterr().out
    for text in ("ceilings: copy 4,270 GB/s", "clocks and power not logged", "2.00x (100 µs)", "not installed", "96.0%"):
        assert text in out
    found = records.read()
    assert [records.key(r) for r in found] == [("made_up", "llama3-8b", "T=1")]
    assert found[0]["command"] == "python -m bench made_up --shapes llama3-8b"
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.page(found)


def test_a_case_of_ours_that_fails_ends_in_1_and_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(monkeypatch, [case("T=0", ours=broken), case("T=1")], []) == 1
    out = capsys.readouterr().out
    assert "FAILED fused/made_up default: T=0" in out
    assert "ours is broken" in out
    assert [r["case"] for r in records.read()] == ["T=1"]


def test_a_quick_run_records_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(monkeypatch, [case()], ["--quick"]) == 0
    assert "2.00x" in capsys.readouterr().out
    assert records.read() == []
    assert not results_page.PAGE.exists()
