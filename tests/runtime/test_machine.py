"""The engine as a machine of submit, step and abort over a tiny pool: whatever happens in whatever order, each output is its solo run's."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyllm.api.params import SamplingParams
from tests.runtime.fake import EOS, FakeDraft, FakeModel, FakeSpec, expected
from tests.runtime.test_draft import nearly, repeating
from tests.runtime.test_engine import assert_idle, make

TEXT = np.random.default_rng(1).integers(0, 59, 110).tolist()
SWITCHES = st.fixed_dictionaries(
    {
        "overlap": st.booleans(),
        "reserve": st.booleans(),
        "reuse": st.booleans(),
        "partial": st.booleans(),
        "tiers": st.sampled_from([(0, 0), (1 << 16, 9)]),
        "graph_sizes": st.sampled_from([(), (3,)]),
        "mixed_sizes": st.sampled_from([(), (8,)]),
        "draft_len": st.sampled_from([0, 0, 3]),
        "draft_model": st.sampled_from([None, (FakeSpec(), FakeDraft(nearly))]),
        "chunk": st.sampled_from([5, 40]),
        "pages": st.sampled_from([9, 10]),  # the first: as many as the longest request needs, beside the dummy page
    }
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(switches=SWITCHES)
    def start(self, switches) -> None:
        switches = switches | ({} if switches["draft_len"] else {"draft_model": None})
        self.engine = make(FakeModel(choose=repeating), max_batch=3, eos_ids=(EOS,), **switches)
        self.requests: list = []

    @rule(n=st.sampled_from([1, 2, 15, 16, 17, 40, 60]), most=st.sampled_from([1, 2, 16, 40, 80]), own=st.booleans(), data=st.data())
    def submit(self, n, most, own, data) -> None:
        prompt = [len(self.requests) % 50, *TEXT[: n - 1]] if own else TEXT[:n]  # its own pages, or those of others
        if data.draw(st.booleans()):  # or those of others up to somewhere inside a page
            prompt = [*prompt[: n * 2 // 3], *[len(self.requests) % 7] * (n - n * 2 // 3)]
        shaped = data.draw(st.sampled_from([{}, {}, {"presence_penalty": 1e-3}, {"temperature": 1e-4}, {"logprobs": 0}]))
        params = SamplingParams(max_tokens=most, **shaped)
        salt, priority = data.draw(st.sampled_from(["", "", "x"])), data.draw(st.integers(0, 1))
        self.requests.append(self.engine.submit(prompt, params, salt=salt, priority=priority))

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 12))
    def step(self, count) -> None:
        for _ in range(count):
            for r in self.engine.step():
                assert r.token_ids

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.requests)))

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "engine"):
            pool = self.engine.pool
            pool.check()
            assert pool.free_pages + pool.used + pool.cached == pool.total
            assert pool.used <= sum(len(r.pages) for r in self.requests)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        for r in self.requests:
            want = expected(r.prompt_token_ids, r.params.max_tokens, 120, repeating, (EOS,))
            assert r.token_ids == (want[: len(r.token_ids)] if r.finish_reason == "abort" else want)
            assert r.logprobs is None or [p.token_id for p in r.logprobs] == r.token_ids
        assert_idle(self.engine)


EngineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestEngineMachine = EngineMachine.TestCase
