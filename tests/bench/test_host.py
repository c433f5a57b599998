"""What a step costs the host: the numbers exist, belong to the work they name, and are printed."""

from __future__ import annotations

import pytest

from bench import host


def test_costs_of_a_few_requests() -> None:
    cost = host.measure(3, 4, "cpu", prompt=70)
    assert cost.rows == 3
    assert min(cost.submit, cost.mixed, cost.decode, cost.launch) > 0
    assert max(cost.submit, cost.mixed, cost.decode) < 1000


def test_more_requests_cost_more() -> None:
    few, many = (min(host.measure(n, 10, "cpu", prompt=8).decode for _ in range(3)) for n in (1, 200))
    assert many > few


def test_a_line_for_each_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert host.main(["1", "2", "--steps", "2", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cpu, host classes ")
    assert [line.split()[0] for line in lines[2:]] == ["1", "2"]
