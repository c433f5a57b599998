"""The page allocator: both twins, step by step against a plain model, and the invariant that nothing is lost or owned twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyllm.runtime import host, pool

TWINS = [pytest.param(pool.BlockPool, id="python")]
if host.NATIVE:
    TWINS.append(pytest.param(host.BlockPool, id="native"))


def ints(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def outcome(call, *args):
    """What a call did, comparable across twins: its value, or the type and text of its error."""
    try:
        value = call(*args)
    except (ValueError, RuntimeError) as error:
        return type(error), str(error)
    return value.tolist() if isinstance(value, np.ndarray) else value


class PoolMachine(RuleBasedStateMachine):
    PAGES = 9

    def __init__(self) -> None:
        super().__init__()
        self.twins = [twin.values[0](self.PAGES) for twin in TWINS]
        self.held: Counter[int] = Counter()

    def both(self, method: str, *args):
        results = [outcome(getattr(twin, method), *args) for twin in self.twins]
        assert all(r == results[0] for r in results), results
        return results[0]

    @rule(count=st.integers(-1, 10))
    def allocate(self, count: int) -> None:
        free = self.PAGES - 1 - len(self.held)
        got = self.both("allocate", count)
        if 0 <= count <= free:
            assert len(set(got)) == count
            assert not set(got) & set(self.held)
            assert 0 not in got
            self.held.update(got)
        else:
            assert isinstance(got, tuple)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ref(self, data) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4))
        assert self.both("ref", ints(pages)) is None
        self.held.update(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=6))
        got = self.both("free", ints(pages))
        if any(n > self.held[page] for page, n in Counter(pages).items()):
            assert got[0] is ValueError
            assert "double free" in got[1]
        else:
            assert got is None
            self.held -= Counter(pages)

    @rule(page=st.integers(-2, 10), method=st.sampled_from(["free", "ref"]))
    def misuse(self, page: int, method: str) -> None:
        if page not in self.held:
            assert self.both(method, ints([*self.held, page]))[0] is ValueError

    @invariant()
    def nothing_lost(self) -> None:
        for twin in self.twins:
            twin.check()
            assert twin.used == len(self.held)
            assert twin.available + twin.used == twin.total == self.PAGES - 1
            assert all(twin.ref_count(page) == self.held[page] for page in range(1, self.PAGES))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolTwins = PoolMachine.TestCase


@pytest.mark.parametrize("twin", TWINS)
def test_order_is_fresh_ascending_then_last_freed_first(twin) -> None:
    p = twin(6)
    assert p.allocate(3).tolist() == [1, 2, 3]
    p.free(ints([2, 1]))
    assert p.allocate(3).tolist() == [2, 1, 4]
    assert p.allocate(0).tolist() == []
    assert p.available == 1


@pytest.mark.parametrize("twin", TWINS)
def test_a_failed_free_changes_nothing(twin) -> None:
    p = twin(6)
    pages = p.allocate(3)
    with pytest.raises(ValueError, match=r"free got page 2 once more than it is held \(double free\)"):
        p.free(ints([*pages, 2]))
    assert p.used == 3
    p.free(pages)
    with pytest.raises(ValueError, match="double free"):
        p.free(pages[:1])
    p.check()
    assert p.available == p.total == 5


@pytest.mark.parametrize("twin", TWINS)
def test_a_page_held_twice_goes_back_once(twin) -> None:
    p = twin(4)
    pages = p.allocate(1)
    p.ref(pages)
    p.free(ints([1, 1]))
    p.check()
    assert p.available == 3


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda t: t(1), ValueError, "BlockPool: pages is 1, expected 2 to 2147483647"),
        (lambda t: t(4).allocate(4), RuntimeError, "BlockPool: allocate wants 4 pages, 3 of 3 are free"),
        (lambda t: t(4).allocate(-1), ValueError, "BlockPool: allocate got count -1, expected 0 or more"),
        (lambda t: t(4).free(ints([0])), ValueError, "BlockPool: free got page 0, expected 1 to 3"),
        (lambda t: t(4).free(ints([4])), ValueError, "BlockPool: free got page 4, expected 1 to 3"),
        (lambda t: t(4).ref(ints([1])), ValueError, "BlockPool: ref got page 1, which is free"),
        (lambda t: t(4).free([1]), TypeError, ""),
        (lambda t: t(4).free(np.array([1])), TypeError, ""),
        (lambda t: t(4).free(ints([1, 2, 3, 4])[::2]), TypeError, ""),
        (lambda t: t(4).free(ints([1])[None]), TypeError, ""),
    ],
)
def test_errors(twin, call, error, text) -> None:
    with pytest.raises(error) as caught:
        call(twin)
    assert text in str(caught.value)
