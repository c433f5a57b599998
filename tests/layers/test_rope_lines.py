"""Ropes of more positions than a table is made for: a line for each token, bit for bit the table's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pyllm.layers import LinearScaling, Llama3, LongRope, Rope, Yarn
from pyllm.layers import rope as module
from pyllm.layers.rope import Scaling
from pyllm.runtime.batch import Batch

LONG = LongRope((1.0,) * 8, tuple(1.0 + i for i in range(8)), 64, 4.0, 1.25)
SCALINGS: list[Scaling | None] = [
    None,
    LinearScaling(4.0),
    Llama3(8.0, 1.0, 1.0, 64),
    Llama3(8.0, 1.0, 4.0, 64),
    Yarn(4.0, 64),
    LONG,
    replace(LONG, original=4096),
]
POSITIONS = torch.tensor([0, 1, 5, 998, 999, 3, 3], dtype=torch.int32)


def batch(positions: torch.Tensor) -> Batch:
    n = len(positions)
    lens = positions[-1:] + 1
    return Batch(positions, positions, positions, torch.tensor([0, n], dtype=torch.int32), lens, torch.zeros(1, 1, dtype=torch.int32), {})


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_lines_equal_the_table(scaling: Scaling | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rope = Rope(16, 5e5, 1000, scaling)
    table, rows = rope.cos_sin(batch(POSITIONS))
    size = 2000 if isinstance(scaling, LongRope) else 1000
    assert len(table) == size
    monkeypatch.setattr(module, "TABLE_NUMBERS", size * 16 - 1)
    lines, each = rope.cos_sin(batch(POSITIONS))
    assert len(lines) == len(POSITIONS) and torch.equal(lines[each.long()], table[rows.long()])


def test_ten_million_positions_need_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "table", lambda *_: pytest.fail("made a table"))
    last = 10485759
    lines, _ = Rope(16, 5e5, last + 1, Llama3(16.0, 1.0, 1.0, 8192)).cos_sin(batch(torch.tensor([last], dtype=torch.int32)))
    assert abs(lines[0, 0].item() - torch.tensor(float(last)).cos().item()) < 1e-6  # the first frequency is 1


def test_long_and_short_texts_of_one_batch_have_their_own_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    rope, position = Rope(16, 5e5, 1000, LONG), torch.tensor([0, 63, 0, 64], dtype=torch.int32)
    starts, lens = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([64, 65], dtype=torch.int32)
    mixed = Batch(position, position, position, starts, lens, torch.zeros(2, 1, dtype=torch.int32), {})
    table, rows = rope.cos_sin(mixed)
    monkeypatch.setattr(module, "TABLE_NUMBERS", 0)
    lines, each = rope.cos_sin(mixed)
    assert rows.tolist() == [0, 63, 1000, 1064] and torch.equal(lines[each.long()], table[rows.long()])


HUGE = {
    "longrope of 2^24 positions": Rope(16, 5e5, 1 << 24, LONG),
    "head of 2^20 dims": Rope(1 << 20, 5e5, 1 << 19),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_a_config_may_say_needs_no_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 and 2048 GiB of table, which a config of a few bytes would have asked for."""
    monkeypatch.setattr(module, "table", lambda *_: pytest.fail("made a table"))
    rope = HUGE[name]
    lines, _ = rope.cos_sin(batch(torch.tensor([rope.max_positions - 1], dtype=torch.int32)))
    assert lines.shape == (1, rope.dim)
