"""Ropes of more positions than a table is made for: a line for each token, bit for bit the table's."""

from __future__ import annotations

import pytest
import torch

from pyllm.layers import LinearScaling, Llama3, LongRope, Rope, Yarn
from pyllm.layers import rope as module
from pyllm.layers.rope import Scaling
from pyllm.runtime.batch import Batch

SCALINGS: list[Scaling | None] = [None, LinearScaling(4.0), Llama3(8.0, 1.0, 1.0, 64), Llama3(8.0, 1.0, 4.0, 64), Yarn(4.0, 64)]
POSITIONS = torch.tensor([0, 1, 5, 998, 999, 3, 3], dtype=torch.int32)


def batch(positions: torch.Tensor) -> Batch:
    n = len(positions)
    lens = positions[-1:] + 1
    return Batch(positions, positions, positions, torch.tensor([0, n], dtype=torch.int32), lens, torch.zeros(1, 1, dtype=torch.int32), {})


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_lines_equal_the_table(scaling: Scaling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = Rope(16, 5e5, 1000, scaling)
    table, rows = rope.cos_sin(batch(POSITIONS))
    assert len(table) == 1000
    monkeypatch.setattr(module, "TABLE_ROWS", 999)
    lines, each = rope.cos_sin(batch(POSITIONS))
    assert len(lines) == len(POSITIONS) and torch.equal(lines[each.long()], table[rows.long()])


def test_ten_million_positions_need_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "table", lambda *_: pytest.fail("made a table"))
    last = 10485759
    lines, _ = Rope(16, 5e5, last + 1, Llama3(16.0, 1.0, 1.0, 8192)).cos_sin(batch(torch.tensor([last], dtype=torch.int32)))
    assert abs(lines[0, 0].item() - torch.tensor(float(last)).cos().item()) < 1e-6  # the first frequency is 1


def test_longrope_keeps_its_two_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_ROWS", 999)
    table, rows = Rope(4, 1e4, 1000, LongRope((1.0, 1.0), (2.0, 2.0), 64, 4.0)).cos_sin(batch(POSITIONS))
    assert len(table) == 2000 and rows.max() < 1000
