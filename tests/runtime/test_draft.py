"""Prompt lookup: what is guessed, and that guessing changes no token: over the checking fake, over real layers, with ends in the middle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm.api.dummy import DummyWeights
from pyllm.api.params import SamplingParams
from pyllm.models import spec_from_config
from pyllm.runtime.draft import accepted, prompt_lookup
from pyllm.runtime.engine import Engine
from tests.runtime.fake import FakeDraft, FakeModel, FakeSpec, expected, hashed
from tests.runtime.test_engine import assert_idle, make
from tests.runtime.tiny import CONFIG, tiny_spec, tiny_weights


def plain(tokens: list[int], most: int, longest: int) -> list[int]:
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + most]
    return []


@settings(max_examples=300)
@given(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30), most=st.integers(0, 8), longest=st.integers(1, 4))
def test_a_guess_is_what_followed_the_longest_ending_last(tokens, most, longest) -> None:
    assert prompt_lookup(np.array(tokens, np.int32), most, longest).tolist() == (plain(tokens, most, longest) if most else [])


def test_guesses_count_until_the_first_wrong_one() -> None:
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accepted([1, 2, 3], [1, 9, 3, 4]) == [1, 9]
    assert accepted([1], [5, 6]) == [5]
    assert accepted([], [5]) == [5]


def repeating(history) -> int:
    """Says its prompt again and again, with a slip now and then."""
    return hashed(history) if len(history) % 11 == 0 else history[-7] if len(history) >= 7 else hashed(history)


def nearly(history) -> int:
    """What a smaller model would say: often the same."""
    return repeating(history) if hashed(history) % 4 else hashed(history)


OPTIONS = st.fixed_dictionaries(
    {
        "pages": st.sampled_from([9, 40]),
        "max_batch": st.sampled_from([1, 3]),
        "chunk": st.sampled_from([7, 100]),
        "reserve": st.booleans(),
        "reuse": st.booleans(),
        "draft_len": st.sampled_from([1, 3, 7]),
        "mixed_sizes": st.sampled_from([(), (8,)]),
        "graph_sizes": st.sampled_from([(), (1,)]),
        "draft_model": st.sampled_from([None, (FakeSpec(), FakeDraft(nearly)), (FakeSpec(), FakeDraft(lambda history: 0))]),
    }
)


@settings(max_examples=100)
@given(
    requests=st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 2, 15, 16, 40, 500])), min_size=1, max_size=6),
    options=OPTIONS,
    ends=st.sampled_from([(), (5, 9, 30, 41)]),
)
def test_guessing_changes_no_token(requests, options, ends) -> None:
    engine = make(FakeModel(choose=repeating), eos_ids=ends, **options)
    rng = np.random.default_rng(len(requests))
    live = []
    for n, most in requests:
        live.append(engine.submit(rng.integers(0, 59, n).tolist(), SamplingParams(max_tokens=most)))
    engine.run()
    for r in live:
        assert r.token_ids == expected(r.prompt_token_ids, r.params.max_tokens, 120, repeating, ends)
        assert len(r.timing.tokens) == len(r.token_ids)
    assert_idle(engine)


def test_repeated_text_takes_far_fewer_steps() -> None:
    """ "serving " 48 times, as a model that goes on with it would have it."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 6
    steps = []
    for draft_len in (0, 7):
        model = FakeModel(choose=lambda history: history[-8])
        engine = make(model, draft_len=draft_len)
        r = engine.submit(prompt, SamplingParams(max_tokens=64))
        engine.run()
        assert r.token_ids == expected(prompt, 64, 120, model.choose)
        steps.append(engine.steps)
    assert (engine.drafted, engine.accepted) == (engine.drafted, engine.drafted)
    assert engine.drafted > 0
    assert steps[1] * 6 < steps[0]


def test_other_requests_run_as_ever_beside_it() -> None:
    """A step with a sampled request, with penalties or log-probabilities guesses nothing."""
    engine = make(FakeModel(choose=repeating), draft_len=4)
    greedy = engine.submit([1, 2, 3, 4, 5, 6, 7] * 2, SamplingParams(max_tokens=30))
    others = [
        SamplingParams(max_tokens=9, temperature=1e-4),
        SamplingParams(max_tokens=9, logprobs=1),
        SamplingParams(max_tokens=9, presence_penalty=0.01),
    ]
    requests = [engine.submit([3, 1, 4, 1, 5, 9, 2], p) for p in others]
    engine.run()
    assert greedy.token_ids == expected(greedy.prompt_token_ids, 30, 120, repeating)
    for r in requests:
        assert r.token_ids == expected([3, 1, 4, 1, 5, 9, 2], 9, 120, repeating)
    assert_idle(engine)


@pytest.mark.parametrize("options", [{}, {"mixed_sizes": [8, 64]}, {"reserve": False, "max_tokens": 256}])
def test_a_real_model_says_the_same(options) -> None:
    """The CPU's matrix product depends on the number of rows; the prompts are fixed ones without near ties."""
    weights = tiny_weights(0)
    prompts = [[7] * 20, [1, 2, 3] * 9, list(range(30))]
    got = []
    for more in ({}, {"draft_len": 7, **options}):
        engine = Engine(tiny_spec(), weights, **({"page_size": 16, "max_tokens": 2048, "max_batch": 4} | more))
        requests = [engine.submit(p, SamplingParams(max_tokens=60, ignore_eos=True)) for p in prompts]
        engine.run()
        got.append([r.token_ids for r in requests])
    assert got[0] == got[1]


@pytest.mark.parametrize("options", [{}, {"mixed_sizes": [8, 64], "graph_sizes": [4]}, {"reserve": False, "max_tokens": 256}])
def test_a_second_model_guesses(options) -> None:
    """The model itself as its own draft is always right, so its cache holds all that the first one's does; another one is mostly wrong."""
    weights, prompts = tiny_weights(0), [[7] * 20, [1, 2, 3] * 9, list(range(30)), [5]]
    small = spec_from_config(CONFIG | {"num_hidden_layers": 1, "head_dim": 32, "num_attention_heads": 2})
    got, engines = [], []
    for more in ({}, {"draft_model": (tiny_spec(), weights)}, {"draft_model": (small, DummyWeights(small))}):
        guessing = {"draft_len": 4, **options} if more else {}
        engine = Engine(tiny_spec(), weights, **({"page_size": 16, "max_tokens": 2048, "max_batch": 4} | guessing | more))
        got.append([engine.submit(p, SamplingParams(max_tokens=60, ignore_eos=True)) for p in prompts])
        engine.run()
        assert_idle(engine)
        engines.append(engine)
    tokens = [[r.token_ids for r in each] for each in got]
    assert tokens[0] == tokens[1] == tokens[2]
    assert engines[1].accepted == engines[1].drafted > 0
    assert engines[2].accepted < engines[2].drafted
    if not options.get("max_tokens"):
        assert engines[1].steps * 4 < engines[0].steps


def test_a_draft_model_that_does_not_fit() -> None:
    for spec, draft_len, text in (
        (FakeSpec(vocab_size=60), 2, "the draft model has 60 tokens, expected the 61 of"),
        (FakeSpec(max_positions=119), 2, "the draft model has 119 positions, expected max_length=120 or more"),
        (FakeSpec(), 0, "draft_len is 0, expected at least 1 with a draft_model"),
    ):
        with pytest.raises(ValueError, match=f"Engine: {text}"):
            make(draft_len=draft_len, draft_model=(spec, FakeDraft(hashed)))


def test_the_pool_is_shared_by_both_models() -> None:
    second = {"draft_len": 2, "draft_model": (FakeSpec(), FakeDraft(hashed))}
    one, two = (make(pages=None, memory_share=1e-6, **more) for more in ({}, second))
    assert two.pool.total + 1 == (one.pool.total + 1) // 2
