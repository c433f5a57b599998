"""Records: replaced by key, merged by family file, judged against their goals, and void once their kernel is another one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import records
from bench.case import ROOT, Goal
from tests.bench.fixtures import CEILINGS, record


def test_a_record_has_exactly_the_documented_fields() -> None:
    assert set(record()) == set(records.FIELDS)


def test_rates_shares_and_floor() -> None:
    made = record(us=50.0, nbytes=200_000_000, flops=1_000_000_000)
    assert made["gbs"] == 4000.0
    assert made["tflops"] == 20.0
    assert (made["share"], made["share_of"], made["copy_us"]) == (0.94, "copy (cupy)", 47.0)
    assert made["floor_us"] == pytest.approx(200_000_000 / 1e3 / CEILINGS.read_gbs + 2, abs=1e-3)


def test_a_matrix_case_is_measured_against_the_matrix_rate() -> None:
    made = record(us=1000.0, flops=388_000_000_000, matrix="bf16")
    assert made["share"] == 0.5
    assert made["share_of"] == "bf16 matrix rate"
    assert made["floor_us"] == pytest.approx(388_000 / (776 * 0.95), abs=1e-3)


def test_new_records_replace_old_ones_of_the_same_case(tmp_path: Path) -> None:
    records.write([record(us=50.0), record(us=60.0, name="T=1"), record(us=70.0, op="other")], tmp_path)
    records.write([record(us=40.0, name="T=1")], tmp_path)
    records.write([record(us=5.0, op="norms", family="norm", stem="norm/norms")], tmp_path)
    found = {records.key(r): r["us"] for r in records.read(tmp_path)}
    assert found == {
        ("made_up", "default", "T=8192 F=4096 bf16"): 50.0,
        ("made_up", "default", "T=1"): 40.0,
        ("other", "default", "T=8192 F=4096 bf16"): 70.0,
        ("norms", "default", "T=8192 F=4096 bf16"): 5.0,
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fused.jsonl", "norm.jsonl"]


def test_lines_of_other_kinds_beside_the_records_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "gpu_tests.jsonl").write_text('{"file": "tests/norm"}\n')
    assert records.read(tmp_path) == []


@pytest.mark.parametrize(("line", "message"), [("{", "2: not JSON"), ("{}", "2: not a record, it lacks op"), ("[1]", "2: not a record")])
def test_a_broken_file_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "fused.jsonl"
    path.write_text(json.dumps(record()) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        records.read(tmp_path)


def test_stale_lists_the_records_of_changed_kernels_alone() -> None:
    made = [record(op="a"), record(op="b"), record(op="b", name="T=1")]
    today = {"fused/a": "d" * 64, "fused/b": "e" * 64}
    found = records.stale(made, today.__getitem__)
    assert [records.key(r)[::2] for r, _ in found] == [("b", "T=8192 F=4096 bf16"), ("b", "T=1")]
    assert "measured at digest dddddddddddd, now eeeeeeeeeeee" in found[0][1]


def test_a_kernel_that_is_gone_makes_its_records_stale() -> None:
    def gone(stem: str) -> str:
        raise FileNotFoundError(f"op_digest: {stem!r} is gone")

    assert "is gone" in records.stale([record()], gone)[0][1]


def test_verdicts_of_each_kind_of_goal() -> None:
    goal = Goal(share=0.95, us=48.5, ratio={"vllm": 1.0})
    assert records.verdicts(record(us=48.0, vllm=50.0, goal=goal)) == [
        ("95% of a copy", "met"),
        ("48.5 µs", "met"),
        ("1x vllm", "met"),
    ]
    assert [v for _, v in records.verdicts(record(us=51.0, vllm=50.0, goal=goal))] == ["missed", "missed", "missed"]
    assert [v for _, v in records.verdicts(record(us=48.0, vllm="not installed", goal=goal))] == ["met", "met", "unknown"]


def test_no_ratio_asks_for_less_than_the_floor() -> None:
    # 1 MB: the floor is 0.2 us at the read rate + 2 us.
    goal = Goal(ratio={"vllm": 1.5})
    assert records.verdicts(record(us=2.2, vllm=2.5, nbytes=1_000_000, goal=goal)) == [("1.5x vllm", "met")]
    assert records.verdicts(record(us=2.3, vllm=2.5, nbytes=1_000_000, goal=goal)) == [("1.5x vllm", "missed")]


def test_ratio_over_an_op_is_the_geometric_mean_with_a_worst_cell() -> None:
    goal = Goal(ratio={"vllm": 1.0})
    cells = [record(us=100.0, vllm=98.0, goal=goal, name="a"), record(us=100.0, vllm=110.0, goal=goal, name="b")]
    mean, worst, number = records.ratio_summary(cells, "vllm")
    assert mean == pytest.approx((0.98 * 1.1) ** 0.5)
    assert (worst, number) == (0.98, 2)
    assert records.ratio_verdict(cells, "vllm") == "met"
    assert records.ratio_verdict([*cells, record(us=100.0, vllm=96.0, goal=goal, name="c")], "vllm") == "missed"
    assert records.ratio_verdict([*cells, record(us=100.0, vllm="not installed", goal=goal, name="c")], "vllm") == "unknown"
    assert records.ratio_verdict(cells, "torch") is None
    assert records.ratio_summary([record(vllm="not installed")], "vllm") is None


def test_best_peer_is_the_fastest_measured_baseline() -> None:
    assert records.best_peer(record(us=50.0, torch=100.0, vllm=60.0)) == ("vllm", 1.2)
    assert records.best_peer(record(us=50.0, torch=100.0, vllm="not installed")) == ("torch", 2.0)
    assert records.best_peer(record(torch="not asked for", vllm="not installed")) is None


def test_the_committed_records_are_of_the_kernels_as_they_are() -> None:
    found = [f"{r['op']} {r['case']}: {why}" for r, why in records.stale(records.read())]
    assert not found, f"measure these again (python -m bench --check-records): {found}"


def test_files_that_hold_no_kernel_records_are_known() -> None:
    """A tool that writes another kind of line there would break every reader of the records."""
    writers = [*(ROOT / "tools").glob("*.py"), ROOT / "Makefile", ROOT / "bench/serving.py"]
    named = {name for path in writers for name in re.findall(r"\b([a-z_]+\.jsonl)", path.read_text(encoding="utf-8"))}
    assert {"gpu_tests.jsonl", "soak.jsonl", "serving.jsonl"} <= named <= set(records.OTHERS)
