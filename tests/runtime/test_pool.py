"""The page allocator: both twins, step by step against a plain model, and the invariant that nothing is lost or owned twice."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyllm.runtime import host
from pyllm.runtime.keys import extend_keys, root_key
from pyllm.twins import pool
from pyllm.twins.pool import KEY_BYTES

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


KEYS = [bytes([n]) * KEY_BYTES for n in range(6)]


def path(*names: int) -> bytes:
    return b"".join(KEYS[n] for n in names)


class PoolMachine(RuleBasedStateMachine):
    """Both twins beside a plain model: holders, names, priorities, and cached pages in the order of their last use."""

    PAGES = 9

    def __init__(self) -> None:
        super().__init__()
        self.twins = [twin.values[0](self.PAGES) for twin in TWINS]
        self.held: Counter[int] = Counter()
        self.named: dict[int, bytes] = {}
        self.cached: list[int] = []  # least recently used first
        self.priority: dict[int, int] = {}

    def both(self, method: str, *args):
        results = [outcome(getattr(twin, method), *args) for twin in self.twins]
        assert all(r == results[0] for r in results), results
        return results[0]

    @rule(count=st.integers(-1, 10))
    def allocate(self, count: int) -> None:
        available = self.PAGES - 1 - len(self.held)
        free = available - len(self.cached)
        got = self.both("allocate", count)
        if 0 <= count <= available:
            assert len(set(got)) == count
            assert not set(got) & set(self.held)
            assert 0 not in got
            evicted = sorted(self.cached, key=self.priority.__getitem__)[: max(0, count - free)]  # stable: by last use within a priority
            assert set(got) & set(self.cached) == set(evicted)
            for page in evicted:
                self.cached.remove(page)
                del self.named[page], self.priority[page]
            self.held.update(got)
        else:
            assert isinstance(got, tuple)

    @rule(names=st.lists(st.integers(0, 5), max_size=4, unique=True))
    def match(self, names: list[int]) -> None:
        page_of = {key: page for page, key in self.named.items()}
        want = [page_of[k] for k in itertools.takewhile(page_of.__contains__, (KEYS[n] for n in names))]
        assert self.both("match", path(*names)) == want
        self.cached = [page for page in self.cached if page not in want]
        self.held.update(want)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), names=st.lists(st.integers(0, 5), max_size=4, unique=True), given=st.booleans())
    def cache(self, data, names: list[int], given: bool) -> None:
        pages = data.draw(st.permutations(sorted(self.held)))[: len(names)]
        names = names[: len(pages)]
        levels = st.sampled_from([0, 34, 35, 36, 100])
        priorities = data.draw(st.lists(levels, min_size=len(pages), max_size=len(pages))) if given else [35] * len(pages)
        known = 0
        for page, name, priority in zip(pages, names, priorities, strict=True):
            owner = next((p for p, k in self.named.items() if k == KEYS[name]), page)
            if owner != page or self.named.get(page, KEYS[name]) != KEYS[name]:
                break
            self.named[page] = KEYS[name]
            self.priority[page] = max(priority, self.priority.get(page, 0))
            known += 1
        assert self.both("cache", path(*names), ints(pages), *([ints(priorities)] if given else [])) == known

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
            behind = 0
            for page in reversed(pages):
                if page in self.named:
                    behind = self.priority[page] = max(behind, self.priority[page])
            self.cached += [p for p in dict.fromkeys(reversed(pages)) if p not in self.held and p in self.named]

    @rule()
    def forget(self) -> None:
        self.both("forget")
        self.named, self.cached, self.priority = {}, [], {}

    @rule(page=st.integers(-2, 10), method=st.sampled_from(["free", "ref"]))
    def misuse(self, page: int, method: str) -> None:
        if page not in self.held:
            assert self.both(method, ints([*self.held, page]))[0] is ValueError
            assert self.both("cache", path(0), ints([page]))[0] is ValueError

    @invariant()
    def nothing_lost(self) -> None:
        for twin in self.twins:
            twin.check()
            assert twin.used == len(self.held)
            assert twin.cached == len(self.cached)
            assert twin.available == twin.free_pages + twin.cached
            assert twin.free_pages + twin.used + twin.cached == twin.total == self.PAGES - 1
            assert all(twin.ref_count(page) == self.held[page] for page in range(1, self.PAGES))


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestPoolTwins = PoolMachine.TestCase


@pytest.mark.parametrize("twin", TWINS)
def test_a_prefix_is_evicted_from_its_end(twin) -> None:
    p = twin(6)
    long = p.allocate(4)
    assert p.cache(path(0, 1, 2, 3), long) == 4
    p.free(long)
    assert (p.free_pages, p.cached, p.used) == (1, 4, 0)
    short = p.match(path(0, 1))
    assert short.tolist() == long[:2].tolist()
    p.free(short)  # used again: page 0 and 1 are younger now
    fresh = p.allocate(3)
    assert set(fresh.tolist()) == {5, long[3], long[2]}
    assert p.match(path(0, 1, 2, 3)).tolist() == long[:2].tolist()
    p.check()


@pytest.mark.parametrize("twin", TWINS)
def test_low_priorities_are_evicted_first_and_beginnings_last(twin) -> None:
    p = twin(8)
    plain, kept, low = p.allocate(2), p.allocate(3), p.allocate(2)
    assert p.cache(path(0, 1), plain) == 2
    assert p.cache(path(2, 3, 4), kept, ints([0, 90, 0])) == 3
    assert p.cache(path(5), low[:1], ints([0])) == 1
    p.free(plain)
    p.free(kept)  # the first goes after the second, so it is worth as much
    p.free(low)
    order = [low[1], kept[2], low[0], plain[1], plain[0], kept[1], kept[0]]  # the first has no name: it is free
    assert [p.allocate(1).item() for _ in range(7)] == order
    p.free(ints(range(1, 8)))
    assert (p.free_pages, p.cached) == (7, 0)
    again = p.allocate(2)
    assert p.cache(path(0, 1), again, ints([0, 0])) == 2
    assert p.cache(path(0, 1), again, ints([70, 0])) == 2  # reused by one who says more, then by one who says less
    assert p.cache(path(0), again[:1]) == 1
    p.free(again)
    other = p.allocate(1)
    assert p.cache(path(2), other, ints([60])) == 1
    p.free(other)
    assert p.allocate(7)[-3:].tolist() == [again[1], other[0], again[0]]
    p.check()


@pytest.mark.parametrize("twin", TWINS)
def test_two_requests_with_one_content_keep_one_name(twin) -> None:
    p = twin(6)
    first, second = p.allocate(2), p.allocate(2)
    assert p.cache(path(0, 1), first) == 2
    assert p.cache(path(0, 1), second) == 0
    p.free(second)
    assert (p.free_pages, p.cached) == (3, 0)
    p.free(first)
    assert (p.free_pages, p.cached) == (3, 2)
    p.forget()
    assert (p.free_pages, p.cached) == (5, 0)
    held = p.allocate(1)
    for bad, text in (
        ((b"x", ints([])), "got 1 bytes of keys, expected a multiple of 32"),
        ((path(0), ints([])), "got 32 bytes of keys, expected 32 for each of 0"),
        ((path(0), held, ints([1, 1])), "got 2 priorities, expected one for each of 1 pages"),
        ((path(0), held, ints([101])), "got priority 101, expected 0 to 100"),
        ((path(0), held, ints([-1])), "got priority -1, expected 0 to 100"),
    ):
        with pytest.raises(ValueError, match=f"cache {text}"):
            p.cache(*bad)
    with pytest.raises(ValueError, match="match got 33 bytes"):
        p.match(bytes(33))


def test_keys_depend_on_the_salt_and_on_all_that_came_before() -> None:
    def keys(tokens: list[int], salt: str = "", pages: int = 2) -> list[bytes]:
        out: list[bytes] = []
        extend_keys(out, root_key(salt), ints(tokens), pages, 4)
        return out

    one = keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert len({*one}) == 2 and {len(k) for k in one} == {KEY_BYTES}
    assert keys([1, 2, 3, 4, 9, 9, 9, 9])[0] == one[0]
    assert keys([0, 2, 3, 4, 5, 6, 7, 8])[1] != one[1]
    assert not {*keys([1, 2, 3, 4, 5, 6, 7, 8], "salt")} & {*one}
    grown = keys([1, 2, 3, 4, 5, 6, 7, 8], pages=1)
    extend_keys(grown, root_key(""), ints([1, 2, 3, 4, 5, 6, 7, 8]), 2, 4)
    assert grown == one


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
        (lambda t: t(1), ValueError, "BlockPool: pages is 1, expected 2 to 2147483546"),
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
