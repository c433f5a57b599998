"""The steps of a schedule, and the seconds that a model of their cost gives: all tokens are there, and more work costs more."""

from __future__ import annotations

import pytest

from bench import schedule
from bench.schedule import Step


@pytest.mark.parametrize(("batch", "chunk"), [(4, 64), (16, 64), (16, 1000)])
def test_all_tokens_are_in_the_steps(batch: int, chunk: int) -> None:
    count, input_len, output_len = 12, 30, 10
    steps = schedule.steps_of(count, input_len, output_len, batch, chunk)
    assert sum(s.prompts for s in steps) == count * input_len
    assert sum(s.ends for s in steps) == count
    assert sum(s.decodes for s in steps) == count * (output_len - 1)
    assert max(s.decodes for s in steps) <= batch
    assert max(s.prompts + s.decodes for s in steps) <= chunk + batch
    assert sum(s.keys for s in steps) == count * sum(range(input_len + 1, input_len + output_len))
    assert sum(s.pairs for s in steps) == pytest.approx(count * input_len**2 / 2)


def test_the_model_gives_back_what_it_was_made_from() -> None:
    """Two decode steps and one of prompts of docs/executor.md, in microseconds, within 3 %."""
    for step, measured in (
        (Step(512, 512 * 1536), 20110),
        (Step(1024, 1024 * 192), 20620),
        (Step(0, 0, 8192, 8, 8 * 1024 * 1024 / 2), 112660),
    ):
        assert step.microseconds == pytest.approx(measured, rel=0.03)
    assert Step(512, 512 * 1536).microseconds < Step(513, 513 * 1536).microseconds
    assert Step(0, 0, 16384).microseconds > 1.9 * Step(0, 0, 8192).microseconds


def test_a_line_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedule.main(["--work", "6x20/5,2x10/3", "--batch", "4,8", "--chunk", "32"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:3] for line in lines] == [[w, b, "32"] for w in ("6x20/5", "2x10/3") for b in ("4", "8")]
    assert all(float(line[-2]) >= 0 and float(line[-1]) > 0 for line in lines)
