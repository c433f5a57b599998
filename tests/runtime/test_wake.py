"""Waking tasks of other threads' event loops: each is woken once, with one call into its loop for all of a step."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pyllm.runtime.wake import together, wake


class Loop:
    """Counts the calls into it, and makes them."""

    def __init__(self, closed: bool = False) -> None:
        self.calls, self.closed = 0, closed

    def call_soon_threadsafe(self, callback, *args) -> None:
        if self.closed:
            raise RuntimeError("Event loop is closed")
        self.calls += 1
        callback(*args)


def events(n: int) -> list[asyncio.Event]:
    return [asyncio.Event() for _ in range(n)]


def test_one_call_into_each_loop() -> None:
    a, b, some = Loop(), Loop(), events(6)
    with together():
        for i, event in enumerate(some):
            wake([(a if i < 4 else b, event)])
        assert not any(e.is_set() for e in some)
    assert all(e.is_set() for e in some)
    assert (a.calls, b.calls) == (1, 1)
    wake([(a, events(1)[0])])  # by itself: at once
    assert a.calls == 2


def test_a_closed_loop_keeps_no_other_from_waking() -> None:
    a, some = Loop(), events(2)
    with together():
        wake([(Loop(closed=True), some[0]), (a, some[1])])
    assert [e.is_set() for e in some] == [False, True]


def test_what_was_held_is_woken_when_a_step_raises() -> None:
    a, some = Loop(), events(2)

    def step() -> None:
        with together():
            wake([(a, some[0])])
            raise ValueError("a step")

    with pytest.raises(ValueError, match="a step"):
        step()
    wake([(a, some[1])])
    assert all(e.is_set() for e in some) and a.calls == 2


def test_another_thread_does_not_wait_for_this_one() -> None:
    a, event = Loop(), events(1)[0]
    with together():
        thread = threading.Thread(target=wake, args=([(a, event)],))
        thread.start()
        thread.join()
        assert event.is_set()


def test_a_task_wakes_in_its_own_loop() -> None:
    async def main() -> str:
        event = asyncio.Event()
        loop = asyncio.get_running_loop()

        def step() -> None:
            with together():
                wake([(loop, event)])

        threading.Thread(target=step).start()
        await asyncio.wait_for(event.wait(), 20)
        return "woken"

    assert asyncio.run(main()) == "woken"
