"""What other engines' users have reported as bugs, as checks of this one: streams, stop strings, reuse, preemption, leaks, validation."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from pyllm import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from pyllm.runtime.engine import Engine
from tests.runtime.fake import VOCAB, FakeModel, FakeSpec, expected
from tests.runtime.test_engine import assert_idle, make
from tests.runtime.test_llm import speaking, wait_idle
from tests.runtime.tiny import save_tiny, tiny_spec, tiny_weights

FAMILY = "👩‍👩‍👧‍👦你好"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def pieces(llm: LLM, prompt, params: SamplingParams) -> list[str]:
    return [look.outputs[0].text_diff for look in llm.generate_async(prompt, params, streaming=True)]


def test_a_prompt_that_ends_inside_a_character_does_not_leak() -> None:
    with speaking("ok") as llm:
        prompt = [49, 50, 51, "好".encode()[0]]
        assert "".join(pieces(llm, prompt, SamplingParams(max_tokens=9))) == "ok"


@pytest.mark.parametrize("max_tokens", [*range(1, 8), 24, 25, 26, 30, 31, 40])
def test_characters_of_several_tokens_come_whole(max_tokens) -> None:
    with speaking(FAMILY) as llm:
        params = SamplingParams(max_tokens=max_tokens)
        got, whole = pieces(llm, "1234", params), llm.generate("1234", params).outputs[0]
        assert "".join(got) == whole.text == FAMILY.encode()[:max_tokens].decode(errors="replace")
        assert not any("\ufffd" in piece for piece in got[:-1])
        assert whole.length == min(max_tokens, len(FAMILY.encode()) + 1)


@pytest.mark.parametrize("before", ["", "A", "AB", "ABC", "xABCABC"])
def test_a_stop_string_that_almost_began_earlier(before) -> None:
    with speaking(f"{before}ABCDtail") as llm:
        params = SamplingParams(max_tokens=40, stop="ABCD")
        got, whole = pieces(llm, "1234", params), llm.generate("1234", params).outputs[0]
        assert "".join(got) == whole.text == before
        assert (whole.finish_reason, whole.stop_reason) == ("stop", "ABCD")


def test_the_tail_that_was_held_back_comes_at_the_end() -> None:
    for max_tokens in range(1, 9):
        with speaking("xABCxABC") as llm:
            params = SamplingParams(max_tokens=max_tokens, stop="ABCD")
            assert "".join(pieces(llm, "1234", params)) == "xABCxABC"[:max_tokens]


def test_greedy_logprobs_name_the_emitted_token() -> None:
    engine = Engine(tiny_spec(), tiny_weights(0), page_size=16, max_tokens=2048)
    requests = [engine.submit([n, n + 1], SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)) for n in range(4)]
    engine.run()
    for r in requests:
        assert [p.top[0][0] for p in r.logprobs] == [p.token_id for p in r.logprobs] == r.token_ids


def test_reuse_and_eviction_never_mix_up_prompts() -> None:
    """Eight pages, twenty prompts of 3.5 pages, three rounds: pages are evicted and read again all the time."""
    for options in ({}, {"overlap": True}, {"reserve": False}):
        engine = make(pages=9, max_batch=2, **options)
        prompts = [[n, *range(1, 56)] if n % 2 else [*range(1, 50), n, n, n, n, n, n, n] for n in range(20)]
        for _ in range(3):
            for prompt in prompts:
                r = engine.submit(prompt, SamplingParams(max_tokens=9))
                engine.run()
                assert r.token_ids == expected(prompt, 9, 120)
        assert engine.pool.cached > 0
        assert_idle(engine)


def test_requests_that_share_a_prefix_survive_preemption(folder) -> None:
    """Also streamed: no piece comes twice, and none is lost."""
    shared = "The same beginning for all of them, two pages. "
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    config = {"kv_cache_config": KvCacheConfig(max_tokens=16 * 14, tokens_per_block=16), "max_num_tokens": 48}
    policy = SchedulerConfig(capacity_scheduler_policy="MAX_UTILIZATION")
    with LLM(folder, device="cpu", max_batch_size=1, **config) as alone:
        want = [alone.generate(shared + str(n), params).outputs[0] for n in range(8)]
    with LLM(folder, device="cpu", max_batch_size=8, scheduler_config=policy, **config) as llm:
        handles = [llm.generate_async(shared + str(n), params, streaming=True) for n in range(8)]
        for handle, one in zip(handles, want, strict=True):
            looks = [(look.outputs[0].token_ids_diff, look.outputs[0].text_diff) for look in handle]
            assert [t for ids, _ in looks for t in ids] == one.token_ids
            assert "".join(text for _, text in looks) == one.text
        stats = wait_idle(llm)
        assert stats["preemptions"] > 0
        assert stats["used_pages"] == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_shared_prefix_is_computed_once_also_by_requests_that_come_together(overlap) -> None:
    model = FakeModel()
    engine = make(model, max_batch=8, chunk=40, overlap=overlap)
    prefix = list(range(48))
    requests = [engine.submit([*prefix, n], SamplingParams(max_tokens=1)) for n in range(8)]
    short = engine.submit([1, 2], SamplingParams(max_tokens=1))  # is not held up by those who wait for the prefix
    engine.run()
    assert sum(tokens for tokens, _, _ in model.steps) == 48 + 8 + 2
    assert [r.cached_tokens for r in requests] == [0] + [48] * 7
    assert short.timing.first_token <= requests[0].timing.first_token
    for r in requests:
        assert r.token_ids == expected(r.prompt_token_ids, 1, 120)
    assert_idle(engine)


def test_a_thousand_requests_with_random_aborts_leave_nothing_behind() -> None:
    rng = random.Random(5)
    engine = make(pages=30, max_batch=6, chunk=40, overlap=True, reserve=False)
    live: list = []
    started = 0
    while started < 1000 or engine.has_work:
        while started < 1000 and len(live) < 12:
            prompt = [rng.randrange(VOCAB - 2)] * rng.randrange(1, 40)
            live.append(engine.submit(prompt, SamplingParams(max_tokens=rng.randrange(1, 30)), priority=rng.randrange(3)))
            started += 1
        if live and rng.random() < 0.3:
            engine.abort(rng.choice(live))
        engine.step()
        live = [r for r in live if not r.finished]
        assert engine.pool.free_pages + engine.pool.cached + engine.pool.used == engine.pool.total
    assert_idle(engine)


def test_a_load_of_ten_times_the_batch_ends() -> None:
    engine = make(pages=20, max_batch=4, overlap=True)
    requests = [engine.submit([n % 50, 1, 2], SamplingParams(max_tokens=10)) for n in range(40)]
    engine.run()
    assert all(r.token_ids == expected(r.prompt_token_ids, 10, 120) for r in requests)
    assert_idle(engine)


def test_a_client_that_vanishes_frees_its_pages() -> None:
    with speaking("x" * 300) as llm:
        stream = iter(llm.generate_async("1234", SamplingParams(max_tokens=300), streaming=True))
        next(stream)
        del stream  # nobody closed it: the generator's end does
        assert wait_idle(llm)["used_pages"] == 0


def test_priorities_go_first_and_a_long_prompt_does_not_stop_the_others() -> None:
    model = FakeModel()
    engine = make(model, max_batch=2, chunk=8, reuse=False)
    first = engine.submit([1, 2], SamplingParams(max_tokens=12))
    engine.step()
    later = [engine.submit([3] * 40, SamplingParams(max_tokens=2), priority=p) for p in (0, 5, 1)]
    engine.run()
    admitted = sorted(later, key=lambda r: r.timing.admitted)
    assert [r.priority for r in admitted] == [5, 1, 0]
    assert first.timing.last_token < later[0].timing.first_token
    assert all(t <= 2 + 8 for t, _, _ in model.steps)  # one token of each generating request in every step


def test_a_preempted_request_keeps_its_tokens_and_its_seed() -> None:
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=3)
    alone = make(FakeModel(peak=1.0))
    want = alone.submit([1, 2, 3], params)
    alone.run()
    for overlap in (False, True):
        engine = make(FakeModel(peak=1.0), pages=8, max_batch=3, reserve=False, overlap=overlap)
        first = [engine.submit([9] * n, SamplingParams(max_tokens=60), priority=1) for n in (20, 25)]
        r = engine.submit([1, 2, 3], params)
        engine.run()
        assert engine.preemptions > 0
        assert r.token_ids == want.token_ids
        assert all(len(f.token_ids) == 60 for f in first)
        assert_idle(engine)


def test_requests_that_cannot_be_are_refused_and_the_engine_lives(folder) -> None:
    with LLM(folder, device="cpu", max_batch_size=2, kv_cache_config=KvCacheConfig(max_tokens=320, tokens_per_block=16)) as llm:
        for options in ({"max_tokens": 0}, {"max_tokens": -1}, {"n": 0}):
            with pytest.raises(ValueError, match=f"SamplingParams: {next(iter(options))} is"):
                llm.generate("a", SamplingParams(**options))
        for prompt in ("", "y" * 160):
            with pytest.raises(ValueError, match="submit: the prompt"):
                llm.generate(["fine", prompt])
        assert llm.generate("fine", SamplingParams(max_tokens=1, ignore_eos=True)).outputs[0].length == 1
        assert wait_idle(llm)["running"] == 0


def test_what_does_not_change_the_output_may_be_switched_freely(folder) -> None:
    """Graph sizes (padding), overlap, reuse, policy, chunk, page size: every pair, on prompts that share a beginning."""
    prompts = ["To be or not to be, that is the question" + tail for tail in ("", ".", ": whether", " again and again")]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    want = None
    switches = itertools.product([False, True], [False, True], [True, False], [16, 64], [7, 512])
    weights = tiny_weights(0)
    for overlap, padded, reserve, page_size, chunk in switches:
        engine = Engine(
            tiny_spec(), weights, page_size=page_size, max_tokens=640, max_batch=4, chunk=chunk, reserve=reserve, overlap=overlap,
            graph_sizes=[2, 4] if padded else [], mixed_sizes=[n for n in (8, 64) if padded and n <= 4 + chunk], reuse=padded,
        )  # fmt: skip
        requests = [engine.submit(list(p.encode()), params) for p in prompts]
        engine.run()
        got = [r.token_ids for r in requests]
        want = want or got
        assert got == want, (overlap, padded, reserve, page_size, chunk)


def test_threads_may_submit_at_once(folder) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with LLM(folder, device="cpu", max_batch_size=4, kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=16)) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        want = {n: llm.generate(f"thread {n}", params).outputs[0].token_ids for n in range(6)}
        with ThreadPoolExecutor(6) as threads:
            got = dict(threads.map(lambda n: (n, llm.generate(f"thread {n}", params).outputs[0].token_ids), range(6)))
        assert got == want
        start = time.perf_counter()
        assert wait_idle(llm)["used_pages"] == 0
        assert time.perf_counter() - start < 5


def test_a_context_longer_than_asked_for_is_cut() -> None:
    engine = make(spec=FakeSpec(max_positions=100), max_length=30)
    r = engine.submit([1] * 10, SamplingParams(max_tokens=500))
    engine.run()
    assert (r.finish_reason, r.length) == ("length", 30)
    with pytest.raises(ValueError, match="expected at most 29"):
        engine.submit([1] * 30)
