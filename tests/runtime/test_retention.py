"""Priorities of cached pages: what a request's config says of each page, which pages then stay, and that no output depends on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyllm
from pyllm import KvCacheConfig, KvCacheRetentionConfig, SamplingParams
from tests.runtime.fake import FakeModel, expected
from tests.runtime.test_engine import assert_idle, make
from tests.runtime.tiny import save_tiny

Range = KvCacheRetentionConfig.TokenRangeRetentionConfig
ALL = KvCacheRetentionConfig([Range(0, None, 90)], 90)
NONE = KvCacheRetentionConfig([Range(0, None, 0)], 0)


@given(
    cuts=st.lists(st.integers(0, 70), max_size=4, unique=True),
    priorities=st.lists(st.integers(0, 100), min_size=5, max_size=5),
    open_end=st.booleans(),
    prompt=st.integers(1, 60),
    first=st.integers(0, 3),
    count=st.integers(0, 4),
)
def test_a_page_has_the_highest_priority_of_its_tokens(cuts, priorities, open_end, prompt, first, count) -> None:
    cuts = sorted(cuts)
    ranges = [Range(a, b, p) for (a, b), p in zip(zip(cuts[::2], cuts[1::2], strict=False), priorities, strict=False)]
    if open_end and len(cuts) % 2:
        ranges.append(Range(cuts[-1], None, priorities[3]))
    config = KvCacheRetentionConfig(ranges[::-1], priorities[4])

    def of(token: int) -> int:
        if token >= prompt:
            return priorities[4]
        return next((r.priority for r in ranges if r.token_start <= token < (r.token_end or prompt)), 35)

    want = [max(of(t) for t in range(page * 16, page * 16 + 16)) for page in range(first, first + count)]
    got = config.priorities(first, first + count, 16, prompt)
    assert (got.dtype, got.tolist()) == (np.int32, want)


@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("partial", [True, False])
def test_the_pages_of_high_priority_stay(reserve: bool, partial: bool) -> None:
    """13 pages, and three prompts that leave 3 of them each: a fourth, of 7 pages, needs the place of one of them."""
    plain, high, low = ([n] * 56 for n in (1, 2, 3))
    configs = {1: None, 2: ALL, 3: NONE}

    def cached(prompts: list[list[int]], again: list[int]) -> int:
        engine = make(pages=14, max_batch=1, reserve=reserve, partial=partial)
        for prompt in [*prompts, [4] * 100, again]:
            request = engine.submit(prompt, SamplingParams(max_tokens=1))
            request.retention = configs.get(prompt[0])
            engine.run()
            assert request.token_ids == expected(prompt, 1, 120)
            assert_idle(engine)
        return request.cached_tokens

    assert [cached([plain, high, low], p) for p in (plain, high, low)] == [48, 48, 0]
    assert [cached([low, high, plain], p) for p in (plain, high, low)] == [48, 48, 0]
    configs = dict.fromkeys((1, 2, 3))
    assert [cached([plain, high, low], p) for p in (plain, high, low)] == [0, 48, 48]  # without priorities the oldest goes


def test_a_prefix_is_worth_what_its_latest_reader_says_if_that_is_more() -> None:
    """13 pages: the first prompt leaves 3, another 5, and a third wants 8."""
    for again, kept in ((None, 0), (ALL, 48), (NONE, 0)):
        engine = make(pages=14, max_batch=1)
        for prompt, config in (([1] * 56, NONE), ([1] * 56, again), ([2] * 88, None), ([3] * 119, None), ([1] * 56, None)):
            request = engine.submit(prompt, SamplingParams(max_tokens=1))
            request.retention = config
            engine.run()
        assert request.cached_tokens == kept, again
        assert_idle(engine)


def test_what_is_generated_has_its_own_priority() -> None:
    """A prompt of 33 tokens and an output of 56, worth nothing: two pages of output alone, which go before an older prompt does."""
    config = KvCacheRetentionConfig((), 0)
    engine = make(pages=14, max_batch=1)
    first = engine.submit([5] * 56, SamplingParams(max_tokens=1))
    engine.run()
    request = engine.submit([6] * 33, SamplingParams(max_tokens=56))
    request.retention = config
    engine.run()
    other = engine.submit([7] * 110, SamplingParams(max_tokens=1))
    engine.run()
    assert (len(other.keys), len(request.keys), len(first.keys)) == (6, 5, 3)
    assert [len(engine.pool.match(b"".join(r.keys))) for r in (other, request, first)] == [6, 3, 3]


CONFIGS = st.sampled_from([None, ALL, NONE, KvCacheRetentionConfig([Range(0, 20, 80), Range(20, None, 5)], 50)])
LENGTHS = st.sampled_from([1, 15, 16, 17, 33, 60])
WORK = st.lists(st.tuples(LENGTHS, st.integers(0, 1), st.sampled_from([1, 5, 40]), CONFIGS), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(work=WORK, pages=st.sampled_from([9, 14]), max_batch=st.sampled_from([1, 3]), reserve=st.booleans(), host=st.booleans())
def test_no_output_depends_on_priorities(work, pages, max_batch, reserve, host) -> None:
    engine = make(FakeModel(), pages=pages, max_batch=max_batch, reserve=reserve, partial=True, tiers=(2**16 * host, 8))
    requests = []
    for length, kind, tokens, config in work:
        requests.append(engine.submit([kind] * length, SamplingParams(max_tokens=tokens)))
        requests[-1].retention = config
        engine.step()
    engine.run()
    assert_idle(engine)
    for r in requests:
        assert r.token_ids == expected(r.prompt_token_ids, r.params.max_tokens, 120)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    cache = KvCacheConfig(max_tokens=10 * 16, tokens_per_block=16)
    folder = save_tiny(tmp_path_factory.mktemp("tiny") / "model")
    with pyllm.LLM(folder, device="cpu", max_batch_size=1, kv_cache_config=cache, progress=False) as made:
        yield made


def test_through_llm_for_one_for_all_for_each_and_for_beams(llm) -> None:
    one, prompts = SamplingParams(max_tokens=1), [[n] * 56 for n in range(1, 4)]
    llm.generate(prompts[:2], one, kv_cache_retention_config=[ALL, None])
    llm.generate_async([9] * 104, one, kv_cache_retention_config=NONE).result()
    assert [llm.generate(p, one).cached_tokens for p in prompts[:2]] == [48, 0]
    beams = SamplingParams(use_beam_search=True, best_of=2, max_tokens=2)
    llm.generate(prompts[2], beams, kv_cache_retention_config=ALL)
    llm.generate([8] * 56, one)
    assert [llm.generate(p, one).cached_tokens for p in (prompts[0], prompts[2])] == [48, 48]
    with pytest.raises(ValueError, match="LLM.generate: 1 kv_cache_retention_config for 2 inputs"):
        llm.generate(prompts[:2], one, kv_cache_retention_config=[ALL])
    with pytest.raises(ValueError, match=r"LLM: kv_cache_retention_config is 90, expected a KvCacheRetentionConfig"):
        llm.generate(prompts[0], one, kv_cache_retention_config=90)


def test_priorities_without_reuse_are_refused(tmp_path) -> None:
    cache = KvCacheConfig(enable_block_reuse=False, max_tokens=256)
    with (
        pyllm.LLM(save_tiny(tmp_path / "model"), device="cpu", kv_cache_config=cache, progress=False) as llm,
        pytest.raises(ValueError, match="kv_cache_retention_config with enable_block_reuse=False, which keeps no pages"),
    ):
        llm.generate([1, 2], kv_cache_retention_config=ALL)


@pytest.mark.parametrize(
    ("make_config", "error", "text"),
    [
        (lambda: Range(-1), ValueError, "token_start is -1, expected an integer, at least 0"),
        (lambda: Range(4, 4), ValueError, "token_end is 4, expected None or an integer, at least 5"),
        (lambda: Range(0, 4, 101), ValueError, "priority is 101, expected an integer from 0 to 100"),
        (lambda: Range(0, 4, True), ValueError, "priority is True, expected an integer from 0 to 100"),
        (lambda: Range(0, None, 5, 5), ValueError, "duration_ms is 5, expected None: a page keeps its priority until it is given away"),
        (lambda: KvCacheRetentionConfig([(0, 4, 1)]), ValueError, "expected a list of KvCacheRetentionConfig.TokenRangeRetentionConfig"),
        (lambda: KvCacheRetentionConfig([Range(2), Range(0, 3)]), ValueError, "expected ranges that do not overlap"),
        (lambda: KvCacheRetentionConfig([Range(0), Range(3)]), ValueError, "expected ranges that do not overlap"),
        (lambda: KvCacheRetentionConfig(decode_retention_priority=-1), ValueError, "decode_retention_priority is -1, expected an integer"),
        (lambda: KvCacheRetentionConfig((), 35, 5), ValueError, "decode_duration_ms is 5, expected None"),
        (lambda: KvCacheRetentionConfig(directory="d"), TypeError, "directory is not supported: pages that are given away go to the host"),
    ],
)
def test_wrong_configs_are_refused(make_config, error, text) -> None:
    with pytest.raises(error) as caught:
        make_config()
    assert text in str(caught.value)
