"""The step packer: both twins against one plain model, over random steps and at the edges of pages and capacities."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm.runtime import host
from pyllm.twins import pack

TWINS = [pytest.param(pack.StepPacker, id="python")]
if host.NATIVE:
    TWINS.append(pytest.param(host.StepPacker, id="native"))

POISON = -77
NAMES = ("ids", "positions", "slots", "q_starts", "kv_lens", "page_table", "logit_rows")


def ints(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def make(twin, t=64, b=8, w=8, r=8, page_size=4, pages=100, vocab=1000):
    buffers = {n: np.full(s, POISON, np.int32) for n, s in zip(NAMES, (t, t, t, b + 1, b, b * w, r), strict=True)}
    return twin(**buffers, page_size=page_size, pages=pages, vocab=vocab), buffers


@st.composite
def steps(draw):
    """A mixed step: decodes (one token far in), whole prompts and chunks of prompts, positions biased to page edges."""
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    sequences, free = [], draw(st.permutations(range(1, 100)))
    for _ in range(draw(st.integers(0, 8))):
        count = draw(st.sampled_from([1, 1, 2, page_size - 1, page_size, page_size + 1, 7]))
        start = max(0, draw(st.integers(0, 2)) * page_size + draw(st.integers(-1, 1)))
        count = max(1, count)
        held = -(-(start + count) // page_size) + draw(st.integers(0, 2))
        if held > len(free):
            break
        pages, free = free[:held], free[held:]
        tokens = draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        sequences.append((tokens, start, pages, draw(st.sampled_from([0, 1, len(tokens)]))))
    width = max((-(-(s + len(t)) // page_size) for t, s, _, _ in sequences), default=0) + draw(st.integers(0, 1))
    return page_size, width, sequences


def model(page_size, width, sequences):
    """The step, said plainly: one entry per token, one row per sequence."""
    out = {n: [] for n in NAMES} | {"q_starts": [0]}
    for tokens, start, pages, wants in sequences:
        for i, token in enumerate(tokens):
            out["ids"].append(token)
            out["positions"].append(start + i)
            out["slots"].append(pages[(start + i) // page_size] * page_size + (start + i) % page_size)
        end = start + len(tokens)
        out["q_starts"].append(len(out["ids"]))
        out["kv_lens"].append(end)
        row = [pages[j] if j * page_size < end else 0 for j in range(min(width, len(pages)))]
        out["page_table"] += row + [0] * (width - len(row))
        out["logit_rows"] += range(len(out["ids"]) - wants, len(out["ids"]))
    return out


@pytest.mark.parametrize("twin", TWINS)
@settings(max_examples=150, deadline=None)
@given(first=steps(), second=steps())
def test_packs_what_the_model_says_and_nothing_else(twin, first, second) -> None:
    packer, buffers = make(twin, t=200, w=64, r=200, page_size=first[0])
    for step in (first, (first[0], *second[1:])) if second[0] == first[0] else (first,):
        for array in buffers.values():
            array[:] = POISON
        buffers["q_starts"][0] = 0
        packer.begin(step[1])
        for tokens, start, pages, wants in step[2]:
            packer.add(ints(tokens), start, ints(pages), wants)
        want = model(*step)
        assert (packer.tokens, packer.sequences, packer.rows) == (len(want["ids"]), len(want["kv_lens"]), len(want["logit_rows"]))
        for name in NAMES:
            assert buffers[name].tolist() == want[name] + [POISON] * (buffers[name].size - len(want[name])), name


ERRORS = [
    ({"tokens": []}, "tokens is empty, expected at least one"),
    ({"start": -1}, "start is -1, expected 0 or more"),
    ({"start": 8}, "positions 8 to 8 + 1 need more than the 2 pages given"),
    ({"start": 2**62}, "need more than the 2 pages given"),
    ({"tokens": range(9)}, "positions 0 to 0 + 9 need more than the 2 pages given"),
    ({"tokens": range(13), "pages": range(1, 9)}, "the step is full: 3 + 13 tokens, capacity 15"),
    ({"tokens": range(12), "pages": range(1, 9)}, "3 pages do not fit the width 2"),
    ({"tokens": [-1]}, "token id -1 is outside 0 to 49"),
    ({"tokens": [3, 50]}, "token id 50 is outside 0 to 49"),
    ({"pages": [0, 1]}, "page 0 is outside 1 to 9"),
    ({"pages": [1, 10], "start": 4}, "page 10 is outside 1 to 9"),
    ({"pages": []}, "need more than the 0 pages given"),
    ({"rows": 2}, "rows is 2, expected 0 to the 1 tokens given"),
    ({"rows": -1}, "rows is -1, expected 0 to the 1 tokens given"),
]


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(("change", "text"), ERRORS)
def test_a_refused_sequence_leaves_the_step_as_it_was(twin, change, text) -> None:
    packer, buffers = make(twin, t=15, b=3, w=2, r=2, pages=10, vocab=50)
    packer.begin(2)
    packer.add(ints([1, 2, 3]), 0, ints([5]), 1)
    before = {n: a.copy() for n, a in buffers.items()}
    args = {"tokens": [7], "start": 0, "pages": [1, 2], "rows": 1} | change
    with pytest.raises(ValueError) as caught:
        packer.add(ints(args["tokens"]), args["start"], ints(args["pages"]), args["rows"])
    assert str(caught.value).startswith("StepPacker: ")
    assert text in str(caught.value)
    assert all((buffers[n] == before[n]).all() for n in NAMES)
    assert packer.tokens == 3
    packer.add(ints([9]), 3, ints([5]), 0)
    assert (packer.tokens, packer.sequences, packer.rows) == (4, 2, 1)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("sizes", "width", "fits", "text"),
    [
        ({"b": 2}, 2, 2, "the step is full: capacity 2 sequences"),
        ({"r": 2}, 2, 2, "the step is full: capacity 2 rows with logits"),
        ({"w": 2}, 6, 2, "the page table is full: 3 rows of 6, capacity 16"),
        ({"w": 2}, 2**62, 0, "the page table is full"),
    ],
)
def test_capacities(twin, sizes, width, fits, text) -> None:
    packer, _ = make(twin, **sizes)
    packer.begin(width)
    for _ in range(fits):
        packer.add(ints([1]), 0, ints([1]), 1)
    with pytest.raises(ValueError, match=text):
        packer.add(ints([1]), 0, ints([1]), 1)


@pytest.mark.parametrize("twin", TWINS)
def test_bad_construction_and_types(twin) -> None:
    for bad, text in [
        ({"page_size": 0}, "page_size is 0"),
        ({"pages": 1}, "pages is 1"),
        ({"pages": 2**29}, "beyond int32, got 536870912 \\* 4"),
        ({"vocab": 0}, "vocab is 0"),
    ]:
        with pytest.raises(ValueError, match=f"StepPacker: .*{text}"):
            make(twin, **bad)
    _, buffers = make(twin)
    with pytest.raises(ValueError, match="q_starts has 8 entries, expected kv_lens \\+ 1 = 9"):
        twin(**(buffers | {"q_starts": buffers["q_starts"][:8]}), page_size=4, pages=10, vocab=10)
    with pytest.raises(ValueError, match="ids, positions and slots differ in size"):
        twin(**(buffers | {"slots": buffers["slots"][:5]}), page_size=4, pages=10, vocab=10)
    with pytest.raises(TypeError):
        twin(**(buffers | {"slots": buffers["slots"].astype(np.int64)}), page_size=4, pages=10, vocab=10)
    packer, _ = make(twin)
    with pytest.raises(ValueError, match="width is -1"):
        packer.begin(-1)
    packer.begin(4)
    for tokens in ([1], np.array([1]), ints([1, 2, 3])[::2], ints([1])[None]):
        with pytest.raises(TypeError):
            packer.add(tokens, 0, ints([1]), 1)


@pytest.mark.parametrize("twin", TWINS)
def test_the_packer_keeps_its_arrays_alive(twin) -> None:
    packer = make(twin)[0]
    packer.begin(1)
    packer.add(ints([1, 2]), 0, ints([1]), 1)
    assert packer.tokens == 2
