"""The step packer in plain Python: twin of `csrc/runtime/step_packer.cpp`, same results and messages, where there is no compiler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pyllm.twins.pool import MAX_INT, require_ints

Ints = NDArray[np.int32]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(f"StepPacker: {message}")


class StepPacker:
    """Packs one ragged step into the caller's int32 arrays (T tokens, B sequences, R rows with logits, W page-table width, P page size).

    ids, positions, slots `[T]` (slot = page * P + offset); q_starts `[B + 1]`; kv_lens `[B]` after the step; page_table `[B, W]` dense at
    the step's width, unused entries 0 (the dummy page); logit_rows `[R]`, the last `rows` tokens of each sequence.
    The arrays' sizes are the capacities: T_max, B_max + 1, B_max, B_max * W_max, R_max.
    Valid pages are 1 to pages - 1, valid tokens 0 to vocab - 1.
    """

    def __init__(
        self,
        ids: Ints,
        positions: Ints,
        slots: Ints,
        q_starts: Ints,
        kv_lens: Ints,
        page_table: Ints,
        logit_rows: Ints,
        *,
        page_size: int,
        pages: int,
        vocab: int,
    ) -> None:
        self._arrays = tuple(require_ints(a) for a in (ids, positions, slots, q_starts, kv_lens, page_table, logit_rows))
        _require(page_size >= 1, f"page_size is {page_size}, expected 1 or more")
        _require(pages >= 2, f"pages is {pages}, expected 2 or more")
        _require(pages <= MAX_INT // page_size, f"pages * page_size is beyond int32, got {pages} * {page_size}")
        _require(1 <= vocab <= MAX_INT, f"vocab is {vocab}, expected 1 to {MAX_INT}")
        _require(positions.size == ids.size == slots.size, "ids, positions and slots differ in size")
        _require(q_starts.size == kv_lens.size + 1, f"q_starts has {q_starts.size} entries, expected kv_lens + 1 = {kv_lens.size + 1}")
        self._page_size, self._pages, self._vocab = page_size, pages, vocab
        self._width = self._tokens = self._sequences = self._rows = 0
        q_starts[0] = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def sequences(self) -> int:
        return self._sequences

    @property
    def rows(self) -> int:
        return self._rows

    def begin(self, width: int) -> None:
        """Start an empty step whose page table is `width` wide."""
        _require(width >= 0, f"width is {width}, expected 0 or more")
        self._width = width
        self._tokens = self._sequences = self._rows = 0

    def add(self, tokens: Ints, start: int, pages: Ints, rows: int) -> None:
        """Append tokens at positions start, start + 1, ...; pages: the sequence's pages from position 0 on (more than needed is fine).

        rows: how many of them, the last ones, want logits.
        """
        need = self._validate(require_ints(tokens), start, require_ints(pages), rows)
        ids, positions, slots, q_starts, kv_lens, page_table, logit_rows = self._arrays
        t, b, count = self._tokens, self._sequences, tokens.size
        at = np.arange(start, start + count, dtype=np.int32)
        ids[t : t + count] = tokens
        positions[t : t + count] = at
        slots[t : t + count] = pages[at // self._page_size] * self._page_size + at % self._page_size
        row = page_table[b * self._width : (b + 1) * self._width]
        row[:need] = pages[:need]
        row[need:] = 0
        self._tokens, self._sequences = t + count, b + 1
        kv_lens[b] = start + count
        q_starts[b + 1] = self._tokens
        logit_rows[self._rows : self._rows + rows] = np.arange(self._tokens - rows, self._tokens, dtype=np.int32)
        self._rows += rows

    def _validate(self, tokens: Ints, start: int, pages: Ints, rows: int) -> int:
        ids, _, _, _, kv_lens, page_table, logit_rows = self._arrays
        count, b, width = tokens.size, self._sequences, self._width
        _require(count >= 1, "tokens is empty, expected at least one")
        _require(start >= 0, f"start is {start}, expected 0 or more")
        _require(
            start <= pages.size * self._page_size - count,
            f"positions {start} to {start} + {count} need more than the {pages.size} pages given",
        )
        _require(self._tokens + count <= ids.size, f"the step is full: {self._tokens} + {count} tokens, capacity {ids.size}")
        _require(b < kv_lens.size, f"the step is full: capacity {kv_lens.size} sequences")
        _require(0 <= rows <= count, f"rows is {rows}, expected 0 to the {count} tokens given")
        _require(self._rows + rows <= logit_rows.size, f"the step is full: capacity {logit_rows.size} rows with logits")
        need = -(-(start + count) // self._page_size)
        _require(need <= width, f"{need} pages do not fit the width {width}")
        _require((b + 1) * width <= page_table.size, f"the page table is full: {b + 1} rows of {width}, capacity {page_table.size}")
        self._in_range(tokens, 0, self._vocab - 1, "token id")
        self._in_range(pages[:need], 1, self._pages - 1, "page")
        return need

    @staticmethod
    def _in_range(values: Ints, low: int, high: int, what: str) -> None:
        bad = (values < low) | (values > high)
        if bad.any():
            raise ValueError(f"StepPacker: {what} {values[bad.argmax()]} is outside {low} to {high}")
