"""What people read: the table, docs/results.md and the plots, all from records; an absent peer is shown, never dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from bench import plots, records, report, results_page, serving
from bench.case import Goal
from tests.bench.fixtures import CEILINGS, record

RATIO = Goal(share=0.95, ratio={"vllm": 1.0})


def made() -> list[records.Record]:
    reason = "incompatible: needs residual: _C::silu_and_mul(Tensor! result, Tensor input) -> ()"
    return [
        record(us=48.0, goal=RATIO),
        record(
            us=1.9, name="T=1 F=8192", nbytes=49_152, flops=49_152, vllm="not installed", goal=Goal(us=2.0, ratio={"vllm": 1.0}), cold=False
        ),
        record(us=60.0, op="other", vllm=reason, torch="failed: RuntimeError: a | b", goal=RATIO),
    ]


def rendered(rows: list[records.Record]) -> str:
    console = Console(width=220, no_color=True)
    with console.capture() as capture:
        console.print(report.table(rows))
    return capture.get()


def test_the_table_shows_times_rates_shares_and_each_baseline() -> None:
    text = rendered(made())
    assert "x torch" in text
    assert "x vllm" in text
    assert "1.04x (50.0 µs)" in text
    assert "97.9%" in text
    assert "4,194" in text
    assert "✓ 95% of a copy" in text
    assert "? 1x vllm" in text
    assert "✗ 95% of a copy" in text


def test_a_missing_peer_keeps_its_column_and_its_reason() -> None:
    text = rendered(made())
    assert "not installed" in text
    assert "needs residual: _C::silu_and_mul" in text


def test_numbers_have_three_digits_and_no_exponent() -> None:
    assert [report.number(v) for v in (None, 0.1234, 1.954, 48.04, 123.4, 12345.6)] == ["–", "0.12", "1.95", "48.0", "123", "12,346"]


def test_the_ceilings_line_says_what_was_not_measured() -> None:
    assert report.ceilings_line(CEILINGS) == "ceilings: copy 4,270 GB/s, read 4,600, write 3,300, bf16 776 TFLOP/s, fp8 1,370 TFLOP/s"


def test_the_page_has_every_record_its_machine_and_its_command() -> None:
    text = results_page.page(made())
    assert "## fused" in text
    assert "### made_up" in text
    assert "### other" in text
    assert "NVIDIA H200; driver 580.1, torch 2.11.0, nvcc 13.0.48" in text
    assert "SM clock 1,755 MHz, power 512 W, 55 °C" in text
    assert "`python -m bench made_up`" in text
    assert "| default: T=1 F=8192 *w* | 1.90 ±1.5% |" in text
    assert "1x vllm: not measured" in text
    assert "**missed**" in text
    assert "failed: RuntimeError: a \\| b" in text
    assert "vllm: 1.04x (worst 1.04x over 1 cells, ratio goal not measured)" in text


def test_every_table_row_has_as_many_cells_as_its_head() -> None:
    lines = [line.replace("\\|", "") for line in results_page.page(made()).splitlines()]
    counts = {line.count("|") for line in lines if line.startswith("|")}
    assert counts == {9}


def test_the_committed_page_is_what_the_records_generate() -> None:
    assert results_page.PAGE.read_text(encoding="utf-8") == results_page.page(records.read(), serving.read()), (
        "run python -m bench --results-only"
    )


def test_the_pictures_of_the_committed_page_are_there() -> None:
    wanted = (plots.ROOFLINE, plots.SPEEDUP) if records.read() else ()
    assert [name for name in wanted if not (plots.IMAGES / name).is_file()] == [], "run python -m bench --results-only --plot"


def test_plots_are_drawn_and_the_same_records_draw_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    first = [path.read_bytes() for path in plots.draw(made(), tmp_path / "a")]
    second = [path.read_bytes() for path in plots.draw(made(), tmp_path / "b")]
    assert len(first) == 2
    assert first == second
    for name, picture in zip((plots.ROOFLINE, plots.SPEEDUP), first, strict=True):
        assert picture.startswith(b"<?xml"), name
        assert len(picture) > 5000, name
    assert plots.draw([], tmp_path / "c") == []


def test_plots_survive_ops_without_flops_or_measured_peers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert len(plots.draw([record(vllm="not installed", torch="not installed")], tmp_path)) == 2
