"""Tokens that are kept together for some steps: all get their own in the end, and at once where someone looks or something ends."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm.api.params import SamplingParams
from pyllm.runtime.engine import Engine
from pyllm.runtime.loop import EngineLoop
from pyllm.runtime.tape import Tape
from tests.runtime.fake import EOS, NAN_TOKEN, FakeModel, FakeSpec, expected
from tests.runtime.test_draft import repeating
from tests.runtime.test_engine import assert_idle, make


def kept(steps: int = 5, **options) -> Engine:
    """An engine that keeps tokens of any number of requests."""
    engine = make(FakeModel(choose=repeating), **options)
    engine._tape.ROWS, engine._tape.STEPS = 1, steps
    return engine


PARAMS = st.sampled_from([{}, {}, {}, {"ignore_eos": True}, {"logprobs": 0}, {"presence_penalty": 1e-3}, {"temperature": 1e-4}])


@settings(max_examples=150, deadline=None)
@given(
    work=st.lists(
        st.tuples(
            st.sampled_from([1, 2, 15, 16, 17, 33, 60]),  # prompt length
            st.sampled_from([1, 2, 5, 17, 40, 500]),  # max_tokens
            st.sampled_from([0, 0, 0, 1, 4, 20]),  # submitted before this step
            st.sampled_from([None, None, None, 0, 3, 9]),  # aborted so many steps later
            st.sampled_from(["", "", "", "nan", "streaming"]),
            PARAMS,
        ),
        min_size=1,
        max_size=7,
    ),
    options=st.fixed_dictionaries(
        {
            "pages": st.sampled_from([12, 60]),
            "max_batch": st.sampled_from([1, 3, 5]),
            "chunk": st.sampled_from([7, 40]),
            "overlap": st.booleans(),
            "deterministic": st.booleans(),
            "graph_sizes": st.sampled_from([(), (1,)]),
        }
    ),
    steps=st.sampled_from([1, 2, 5, 32]),
)
def test_any_schedule_gives_each_request_its_own_tokens(work, options, steps) -> None:
    if options["deterministic"]:
        options = options | {"chunk": 40, "graph_sizes": ()}
    engine, live, aborts = kept(steps, eos_ids=(EOS,), **options), [], {}
    for step in range(2000):
        for length, most, at, abort_after, kind, params in work:
            if at == step:
                prompt = [(len(live) + i) % 50 for i in range(length - 1)] + [NAN_TOKEN if kind == "nan" else 3]
                request = engine.submit(prompt, SamplingParams(max_tokens=most, **params))
                request.watched = kind == "streaming"
                live.append((request, kind))
                aborts.setdefault(step + (abort_after if abort_after is not None else 10**6), []).append(request)
        for request in aborts.get(step, ()):
            engine.abort(request)
        engine.step()
        if step > 20 and not engine.has_work:
            break
    assert_idle(engine)
    for r, kind in live:
        want = expected(r.prompt_token_ids, r.params.max_tokens, 120, repeating, () if r.params.ignore_eos else (EOS,))
        if r.finish_reason == "abort":
            want = want[: len(r.token_ids)]
        assert r.token_ids == ([] if kind == "nan" else want)
        assert r.finish_reason in (("error", "abort") if kind == "nan" else ("stop", "length", "abort"))
        assert len(r.timing.tokens) == len(r.token_ids) <= r.sampled
        assert r.timing.tokens == sorted(r.timing.tokens)


@pytest.mark.parametrize("overlap", [True, False])
def test_many_requests_get_their_tokens_by_blocks(overlap: bool) -> None:
    engine = make(FakeModel(), max_batch=Tape.ROWS, pages=Tape.ROWS * 8 + 1, overlap=overlap, chunk=200)
    requests = [engine.submit([n % 50, 1], SamplingParams(max_tokens=100)) for n in range(Tape.ROWS)]
    seen: list[int] = []
    while engine.has_work:
        engine.step()
        seen.append(len(requests[0].token_ids))
    assert max(np.diff(seen)) == Tape.STEPS + 1  # so many at once, and the token after them
    assert len(set(seen)) < 20
    for r in requests:
        assert r.token_ids == expected(r.prompt_token_ids, 100, 120)
    assert len({tuple(r.timing.tokens) for r in requests}) == 1
    assert_idle(engine)


def test_who_watches_gets_each_token_at_once() -> None:
    engine = kept(overlap=False)
    requests = [engine.submit([n, 1], SamplingParams(max_tokens=20)) for n in (1, 2)]
    requests[1].watched = True
    for n in range(1, 20):
        assert set(engine.step()) == set(requests)
        assert [len(r.token_ids) for r in requests] == [n, n]


def test_an_abort_and_a_failing_step_hand_out_what_is_known() -> None:
    engine = kept(steps=32, overlap=False)
    first, second = (engine.submit([n, 1], SamplingParams(max_tokens=50, ignore_eos=True)) for n in (1, 2))
    for _ in range(10):
        assert engine.step() == [first, second]  # they have got a token, although they are not told yet
    assert len(first.token_ids) < 10
    engine.abort(first)
    assert [len(r.token_ids) for r in (first, second)] == [10, 10]
    for _ in range(10):
        engine.step()
    engine.fail("because")
    assert (second.finish_reason, second.error, len(second.token_ids)) == ("error", "because", 20)
    assert_idle(engine)


def test_a_shutdown_hands_out_what_is_known() -> None:
    engine = kept(steps=10**6, overlap=False, spec=FakeSpec(10**6), pages=3000)
    requests = [engine.prepare([n, 1], SamplingParams(max_tokens=20_000)) for n in (1, 2)]
    loop = EngineLoop(engine, 60.0)
    loop.submit(requests)
    while engine.steps < 20:
        time.sleep(0.01)
    assert len(requests[0].token_ids) < 20
    loop.shutdown()
    assert [r.finish_reason for r in requests] == ["abort"] * 2
    assert len(requests[0].token_ids) >= 19
    assert requests[0].token_ids == expected(requests[0].prompt_token_ids, len(requests[0].token_ids), 10**6, repeating)


def test_where_each_step_needs_all_tokens_nothing_is_kept() -> None:
    for options in ({"reserve": False}, {"draft_len": 3}):
        engine = kept(overlap=False, **options)
        request = engine.submit([1, 2], SamplingParams(max_tokens=20))
        for _ in range(6):
            engine.step()
            assert request.sampled == len(request.token_ids)
        engine.run()
        assert_idle(engine)
