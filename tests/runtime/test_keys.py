"""What is known of named pages: the one that shares the longest beginning, as long as it is known, among the latest."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pyllm.runtime.keys import PageTexts


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(pages=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), max_size=8), wanted=st.lists(st.integers(0, 2), max_size=4))
def test_the_best_page_shares_most(pages, wanted) -> None:
    texts = PageTexts(100)
    for i, page in enumerate(pages):
        texts.add(b"root", bytes([i]), ints(*page))
    key, count = texts.best(b"root", ints(*wanted))
    assert count == max((common(p, wanted) for p in pages), default=0)
    assert count == 0 or common(pages[key[0]], wanted) == count
    assert texts.best(b"other", ints(*wanted)) == (b"", 0)


def test_old_names_go_and_what_is_removed_is_not_found() -> None:
    texts = PageTexts(3)
    for i in range(5):
        texts.add(b"root", bytes([i]), ints(i, i))
    assert [texts.best(b"root", ints(i, 9))[1] for i in range(5)] == [0, 0, 1, 1, 1]
    texts.add(b"root", bytes([2]), ints(8, 8))  # known: a name means one content
    assert texts.best(b"root", ints(8)) == (b"", 0)
    texts.remove(bytes([3]))
    assert texts.best(b"root", ints(3)) == (b"", 0)


def test_only_the_latest_siblings_are_looked_at() -> None:
    texts = PageTexts(1000)
    for i in range(PageTexts.SIBLINGS + 1):
        texts.add(b"root", i.to_bytes(2, "little"), ints(i))
    assert texts.best(b"root", ints(0)) == (b"", 0)
    assert texts.best(b"root", ints(1))[1] == 1
