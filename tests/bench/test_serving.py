"""The table of whole engines: rows, goals, and what a record says. The engines themselves are measured on a GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import engines, results_page, serving
from pyllm.api.dummy import SHAPES


def record(**changes: Any) -> dict[str, Any]:
    made = {"row": "8B FP8, 256", "unit": "tok/s", "goal": 0, "goal_ratio": 1.3, "value": 1300.0, "vllm": 1000.0}
    made |= {"gpu": "GPU", "torch": "2.11", "commit": "abc", "time": "2026-01-01T00:00:00Z", "command": "python -m bench.serving"}
    return made | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "met"),
        ({"value": 1299.0}, "missed"),
        ({"vllm": None}, "unknown"),
        ({"vllm": None, "goal": 1400}, "missed"),
        ({"vllm": None, "goal": 1200}, "unknown"),
        ({"goal": 1400}, "missed"),
        ({"goal": 1300}, "met"),
        ({"unit": "ms", "goal": 16, "goal_ratio": None, "value": 15.9}, "met"),
        ({"unit": "ms", "goal": 16, "goal_ratio": None, "value": 16.1}, "missed"),
        ({"peer": "hf", "hf": 86.0, "goal_ratio": 15, "vllm": 1.0}, "met"),
        ({"peer": "hf", "hf": 87.0, "goal_ratio": 15, "vllm": 1.0}, "missed"),
        ({"peer": "hf", "hf": None, "goal_ratio": 15}, "unknown"),
    ],
)
def test_a_row_meets_its_goals_or_not(changes: dict[str, Any], expected: str) -> None:
    assert serving.verdict(record(**changes)) == expected


def test_the_table_shows_both_engines_and_their_ratio() -> None:
    rows = serving.table([record(), record(unit="ms", value=10.0, vllm=20.0, goal_ratio=None, goal=16), record(vllm=None)])[2:]
    assert rows[0] == "| 8B FP8, 256 | 1,300 tok/s | 1,000 | 1.30 | 1.3x | met |"
    assert "| 20 | 2.00 | 16 ms |" in rows[1]
    assert "| – | – | 1.3x | not measured |" in rows[2]
    (row,) = serving.table([record(peer="hf", hf=65.0, goal_ratio=15)])[2:]
    assert "| 65 (transformers) | 20.00 | 15x | met |" in row


def test_the_page_has_a_section_where_engines_were_measured() -> None:
    new = record(row="new", steps=10, seconds=0.2, host_ms_per_step=0.5, decode_steps=8, host_ms_per_decode_step=0.125)
    text = results_page.page([], [record(steps=10, seconds=0.1, host_ms_per_step=0.25), new])
    assert "## Whole engines" in text
    assert "| 8B FP8, 256 | 10 | 10.00 | 0.25 | not measured |" in text
    assert "| new | 10 | 20.00 | 0.50 | 0.12 |" in text
    assert "## Whole engines" not in results_page.page([])


def test_prompts_differ_between_rows_and_share_only_the_prefix() -> None:
    shared = next(r for r in serving.ROWS if r.kind == "prefix")
    ids = serving.prompts(shared, 1000)
    assert len(ids) == shared.count and {len(p) for p in ids} == {shared.input_len}
    assert len({tuple(p[:2048]) for p in ids}) == 1 and len({tuple(p[2048:]) for p in ids}) == shared.count
    a, b = (serving.prompts(r, 1000)[0] for r in serving.ROWS[:2])
    assert a != b[: len(a)]


class Engine:
    """Stands in for an engine: 10 tokens a second; the first token of a salted run comes late."""

    def run(self, ids: list[list[int]], output_len: int, gaps: Any = None, salted: bool = False) -> dict[str, Any]:
        tokens = len(ids) * output_len
        return {
            "tokens": tokens,
            "seconds": tokens / 10,
            "ttft_ms": [60.0 if salted else 6.0] * len(ids),
            "steps": 1,
            "host_ms_per_step": 0.1,
        }


@pytest.mark.parametrize("row", [r for r in serving.ROWS if r.kind != "lookup"], ids=lambda r: r.name)
def test_each_kind_of_row_is_measured(row: serving.Row) -> None:
    rates = {"8B FP8, 256 x (1024 / 1024)": 4.0}
    got = serving.measure(Engine(), row, 50, rates)
    assert got["value"] == pytest.approx({"throughput": 10.0, "ttft": 6.0, "load": 6.0, "prefix": 10.0}[row.kind])
    json.dumps(got)


SMALL = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "rope_scaling": None}


def test_the_model_of_the_lookup_row_repeats_its_prompt_but_for_the_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.SHAPES, "small", SHAPES["llama-3.1-8b"] | SMALL)
    monkeypatch.setitem(engines.MODELS, "small", ("small", None, "auto"))
    prompt = engines.edited_text(120, 400, 1 / 8)
    kept = [i for i, t in enumerate(prompt[:-1]) if t == i]
    assert prompt[0] == prompt[-1] == 0 and len(prompt) == 120
    assert 119 * 0.75 < len(kept) < 119 and all(t >= 200 for i, t in enumerate(prompt[:-1]) if i not in kept)
    got = engines.lookup_speed("small", prompt, 60, device="cpu", dtype="fp32")
    assert got["value"] == pytest.approx(got["guessing"] / got["plain"])
    assert 0.3 < got["acceptance_rate"] < 1  # each edit ends a run of guesses


def test_a_model_that_says_something_else_is_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.SHAPES, "small", SHAPES["llama-3.1-8b"] | SMALL)
    monkeypatch.setitem(engines.MODELS, "small", ("small", None, "auto"))
    monkeypatch.setattr(engines, "walk", lambda start, count, vocab: [5] * count)
    with pytest.raises(RuntimeError, match="the tokens are not those of the model"):
        engines.lookup_speed("small", [0, 1, 2, 0], 20, device="cpu", dtype="fp32")


@pytest.mark.parametrize(
    ("name", "seconds", "expected"),
    [("pyllm", 1e6, 7), ("vllm", 1e6, 5), ("pyllm", 30.0, 6), ("pyllm", 15.0, 4), ("pyllm", 0.0, 0)],  # 15 s: no rate for the load
)
def test_a_worker_does_what_it_has_time_for(
    name: str, seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [r for r in serving.ROWS if r.model == "8b-fp8"]
    monkeypatch.setitem(serving.ENGINES, name, lambda model, folder: Engine())
    monkeypatch.setattr(serving, "lookup_speed", lambda *_: {"value": 3.0})
    serving.work(name, "8b-fp8", [r for r in rows if r.kind != "lookup"], time.time() + seconds)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line.removeprefix("ROW "))["row"] for line in lines] == [r.name for r in rows if r.name in "".join(lines)]
    assert len(lines) == expected
    serving.work("pyllm", "8b-fp8", [r for r in rows if r.kind == "lookup"], time.time() + seconds)
    assert len(capsys.readouterr().out.splitlines()) == (seconds > 25)


@pytest.mark.parametrize(("seconds", "started"), [(5.0, False), (100.0, True)])
def test_what_has_no_time_left_is_left_out(
    seconds: float, started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = serving.ROWS[0]
    reply = "print('ROW ' + '{\"row\": \"" + row.name + '", "value": 3.5}\')'
    monkeypatch.setattr(serving, "_command", lambda *_: [sys.executable, "-c", reply])
    got = serving._collect("pyllm", row.model, [row], tmp_path / "log", time.time() + seconds)
    assert got == ({row.name: {"value": 3.5}} if started else {})
    assert ("left out, the time is up" in capsys.readouterr().out) is not started


def test_a_worker_is_ended_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(serving.START, "pyllm", 0.0)
    monkeypatch.setattr(serving, "_command", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    start = time.time()
    assert serving._collect("pyllm", "8b-fp8", [serving.ROWS[2]], tmp_path / "log", start + 1) == {}
    assert time.time() - start < 30


def test_names_are_unique_and_rates_come_before_their_use() -> None:
    names = [r.name for r in serving.ROWS]
    assert len(set(names)) == len(names)
    assert all(names.index(r.of) < i for i, r in enumerate(serving.ROWS) if r.of)


def test_step_times_are_those_between_tokens_of_all_requests() -> None:
    """Steps at 1, 2, 3, 5 and 6 s; the second request gets its first token with the step that ends at 3."""
    assert engines.step_times([[1.0, 2.0, 3.0, 5.0], [3.0, 5.0, 6.0]]) == {"prompt_step_ms": 1000.0, "decode_step_ms": 1000.0}
    assert engines.step_times([[1.0, 2.0, 4.0, 7.0]]) == {"decode_step_ms": 2000.0}
    assert engines.step_times([[1.0]]) == {}


def test_transformers_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(engines.MODELS, "small", ("small", None, "auto"))
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"] | SMALL))
    got = engines.Transformers("small", tmp_path, "cpu").run([[1, 2, 3]], 5)
    assert got["tokens"] == 5 and got["seconds"] > 0
    with pytest.raises(ValueError, match="8b-fp8 is quantized, expected a model in bf16"):
        engines.Transformers("8b-fp8", tmp_path, "cpu")


def test_a_peer_runs_the_rows_that_are_compared_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    asked: list[tuple[str | None, set[str]]] = []
    monkeypatch.setattr(serving, "_measure_all", lambda models, rows, against, end: asked.append((against, {r.peer for r in rows})) or 0)
    for arguments in ([], ["--against", "vllm"], ["--against", "hf"]):
        assert serving.main(arguments) == 0
    assert asked == [(None, {"vllm", "hf"}), ("vllm", {"vllm"}), ("hf", {"hf"})]


def test_runs_at_the_same_time_keep_the_records_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "RESULTS", tmp_path / "serving.jsonl")
    monkeypatch.setattr(serving, "ROOT", tmp_path)
    (tmp_path / "build").mkdir()
    first, second = serving.ROWS[0].name, serving.ROWS[1].name
    serving._keep([record(row=second, value=1.0)])
    serving._keep([record(row=first, value=2.0)])
    serving._keep([record(row=second, value=3.0)])
    assert [(r["row"], r["value"]) for r in serving.read()] == [(first, 2.0), (second, 3.0)]


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.main(["nothing"])
    assert "no row or model is named 'nothing'" in capsys.readouterr().err


def test_a_missing_peer_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        serving.main(["--against", "vllm"])
    assert "vLLM is not installed" in capsys.readouterr().err


def test_what_was_measured_is_kept_when_a_later_engine_ends_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours first, its lookup rows, then the peer: each adds to the records."""
    rows = [r for r in serving.ROWS if r.model == "8b-fp8"]
    monkeypatch.setattr(serving, "RESULTS", tmp_path / "serving.jsonl")
    monkeypatch.setattr(serving, "ROOT", tmp_path)
    about = {"gpu": "GPU", "torch": "2.11", "commit": "abc", "time": "2026-01-01T00:00:00Z", "command": "c"}
    monkeypatch.setattr("bench.machine.describe", lambda *_: about)
    asked = []

    def collect(name: str, model: str, some: list[serving.Row], log: Path, end: float) -> dict[str, dict[str, Any]]:
        asked.append((name, len(some), len(serving.read())))
        if name == "vllm" and len(asked) > 3:
            raise KeyboardInterrupt
        return {r.name: {"value": 2.0 if name == "pyllm" else 1.0} for r in some if name == "pyllm" or r.kind == "throughput"}

    monkeypatch.setattr(serving, "_collect", collect)
    assert serving._measure_all(["8b-fp8"], rows, "vllm", 1e9) == 0
    assert asked == [("pyllm", len(rows) - 1, 0), ("pyllm", 1, len(rows) - 1), ("vllm", len(rows), len(rows))]
    assert [r["row"] for r in serving.read()] == [r.name for r in rows]
    assert {r["vllm"] for r in serving.read() if "x (" in r["row"]} == {1.0}
    with pytest.raises(KeyboardInterrupt):
        serving._measure_all(["1b-bf16"], [r for r in serving.ROWS if r.model == "1b-bf16"], "vllm", 1e9)
    assert {r["row"] for r in serving.read()} >= {r.name for r in serving.ROWS if r.model == "1b-bf16"}


def test_records_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "RESULTS", tmp_path / "serving.jsonl")
    assert serving.read() == []
    serving.RESULTS.write_text(json.dumps(record()) + "\n")
    assert serving.read() == [record()]
