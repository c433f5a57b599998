"""The engine over the checking fake model: any mix of requests gives each the tokens it gets alone, and every page comes back."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm.api.params import SamplingParams
from pyllm.runtime.engine import Engine
from pyllm.runtime.graph import graph_sizes, mixed_shapes, wasteful
from pyllm.twins import pack, pool
from tests.runtime.fake import EOS, NAN_TOKEN, VOCAB, FakeModel, FakeSpec, expected, hashed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(model=None, spec=None, **options) -> Engine:
    options = {"page_size": 16, "pages": 40, "max_batch": 4, "chunk": 24, "graph_sizes": []} | options  # the fake cannot be captured
    engine = Engine(spec or FakeSpec(), model or FakeModel(), **options)
    for cache in engine.kv.caches.values():  # what nobody stored must never be read
        cache.k.fill_(math.nan)
        cache.v.fill_(math.nan)
    return engine


def assert_idle(engine: Engine) -> None:
    assert not engine.has_work
    engine.pool.check()
    assert engine.pool.used == 0
    assert engine.pool.free_pages + engine.pool.cached == engine.pool.available == engine.pool.total


EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 48, 60]
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(EDGES),  # prompt length
        st.sampled_from([1, 2, 5, 16, 17, 40, 500]),  # max_tokens; 500 reaches the context's end
        st.integers(0, 12),  # submitted before this step
        st.sampled_from([None, None, None, 0, 3, 9]),  # aborted so many steps later
    ),
    min_size=1,
    max_size=9,
)


OPTIONS = st.fixed_dictionaries(
    {
        "pages": st.sampled_from([9, 12, 40]),
        "max_batch": st.sampled_from([1, 2, 5]),
        "chunk": st.sampled_from([1, 7, 16, 33, 200]),
        "overlap": st.booleans(),
        "reserve": st.booleans(),
        "reuse": st.booleans(),
        "padded": st.booleans(),  # decode steps as CUDA graphs would run them
    }
)


@settings(max_examples=150)
@given(requests=REQUESTS, options=OPTIONS, alike=st.booleans())
def test_any_schedule_gives_each_request_its_own_tokens(requests, options, alike) -> None:
    """alike: prompts are beginnings of one text, so that they share pages where `reuse` is on."""
    model = FakeModel()
    padded, rng = options.pop("padded"), np.random.default_rng(sum(n for n, *_ in requests))
    sizes = {"graph_sizes": [s for s in (2, 5) if s <= options["max_batch"]], "mixed_sizes": [1 + options["chunk"] // 2]} if padded else {}
    engine = make(model, **options, **sizes)
    live, aborts, text = [], {}, rng.integers(0, NAN_TOKEN - 1, 100).tolist()
    for step in range(10_000):
        for n, max_tokens, at, abort_after in requests:
            if at == step:
                prompt = text[:n] if alike else rng.integers(0, NAN_TOKEN - 1, n).tolist()
                r = engine.submit(prompt, SamplingParams(max_tokens=max_tokens), priority=max_tokens % 3)
                live.append(r)
                if abort_after is not None:
                    aborts.setdefault(step + abort_after, []).append(r)
        for r in aborts.get(step, ()):
            engine.abort(r)
        moved = engine.step()
        assert all(r.token_ids for r in moved)
        assert engine.pool.free_pages + engine.pool.cached + engine.pool.used == engine.pool.total
        if step > 12 and not engine.has_work:
            break
    assert len(live) == len(requests)
    for r in live:
        want = expected(r.prompt_token_ids, r.params.max_tokens, engine.spec.max_positions)
        assert r.token_ids == (want if r.finish_reason == "length" else want[: len(r.token_ids)])
        assert r.finish_reason in ("length", "abort")
    most = options["max_batch"]
    assert all(t <= most + options["chunk"] and b <= most for t, b, _ in model.steps)
    assert not (options["reserve"] and engine.preemptions)
    assert_idle(engine)


@pytest.mark.parametrize("device", DEVICES)
def test_a_mixed_batch_on_each_device(device) -> None:
    engine = make(device=device, chunk=20)
    requests = [engine.submit(list(range(1, 1 + n)), SamplingParams(max_tokens=20)) for n in (1, 16, 17, 40, 33, 5)]
    engine.run()
    for r in requests:
        assert r.token_ids == expected(r.prompt_token_ids, 20, engine.spec.max_positions)
    assert_idle(engine)


def test_a_prompt_is_prefilled_beside_decodes() -> None:
    model = FakeModel()
    engine = make(model, chunk=16)
    engine.submit([1, 2, 3], SamplingParams(max_tokens=12))
    engine.step()
    engine.submit(list(range(40)), SamplingParams(max_tokens=2))
    engine.run()
    assert model.steps[:5] == [(3, 1, 1), (16, 2, 1), (16, 2, 1), (11, 2, 2), (2, 2, 2)]  # 16 tokens, the generated one among them


@pytest.mark.parametrize(
    ("options", "reason", "count"),
    [
        ({"max_tokens": 50}, "stop", 4),
        ({"max_tokens": 4}, "stop", 4),
        ({"max_tokens": 3}, "length", 3),
        ({"max_tokens": 50, "ignore_eos": True}, "length", 50),
        ({"max_tokens": 50, "stop_token_ids": (5,)}, "stop", 2),
        ({"max_tokens": 50, "ignore_eos": True, "stop_token_ids": (8,)}, "stop", 5),
        ({"max_tokens": 500, "ignore_eos": True}, "length", 117),
    ],
)
def test_why_a_request_ends(options, reason, count) -> None:
    engine = make(FakeModel(choose=lambda history: len(history) + 1 if len(history) < 20 else 30), eos_ids=(EOS, 59))
    r = engine.submit([1, 1, 1], SamplingParams(**options))
    engine.run()
    assert (r.finish_reason, len(r.token_ids)) == (reason, count)
    assert r.token_ids[:4] == [4, 5, 6, 7][:count]
    assert r.stop_reason == (r.token_ids[-1] if reason == "stop" else None)
    assert r.text_token_ids == (r.token_ids[:-1] if reason == "stop" else r.token_ids)
    assert_idle(engine)


def test_the_context_ends_a_request_that_starts_at_its_last_position() -> None:
    engine = make(spec=FakeSpec(max_positions=33))
    r = engine.submit([5] * 32, SamplingParams(max_tokens=9))
    engine.run()
    assert (r.finish_reason, len(r.token_ids)) == ("length", 1)


def test_requests_start_in_order_of_arrival_and_wait_for_their_pages() -> None:
    engine = make(pages=5, max_batch=4)  # 4 pages of 16
    first = engine.submit([1] * 20, SamplingParams(max_tokens=13))  # 2 pages: positions 0 to 31
    big = engine.submit([2] * 40, SamplingParams(max_tokens=9))  # 3 pages: must wait for the first
    small = engine.submit([3], SamplingParams(max_tokens=2))  # 1 page, free all the time, but behind the big one
    while not first.finished:
        engine.step()
        assert engine.pool.used in (0, 2)
    assert not big.token_ids
    assert not small.token_ids
    used = [(engine.step(), engine.pool.used)[1] for _ in range(2)]
    assert used == [3, 4]  # the big one's prompt fills a step
    engine.run()
    assert big.timing.admitted >= first.timing.last_token
    assert_idle(engine)


def test_no_more_requests_start_than_fill_a_step() -> None:
    """Those that wait may still be passed by one of a higher priority."""
    engine = make(max_batch=4, chunk=32)
    requests = [engine.submit([n] * 20, SamplingParams(max_tokens=30)) for n in (1, 2, 3)]
    engine.step()
    assert (engine.running, engine.waiting) == (requests[:2], requests[2:])
    urgent = engine.submit([4] * 40, SamplingParams(max_tokens=30), priority=1)
    engine.step()
    assert (engine.running, engine.waiting) == ([*requests[:2], urgent], requests[2:])
    engine.run()
    assert requests[0].timing.admitted < urgent.timing.admitted < requests[2].timing.admitted
    for r in (*requests, urgent):
        assert r.token_ids == expected(r.prompt_token_ids, 30, 120)
    assert_idle(engine)


def test_nan_logits_fail_one_request_alone() -> None:
    engine = make()
    good = engine.submit([1, 2, 3], SamplingParams(max_tokens=8, logprobs=1))
    bad = engine.submit([4, NAN_TOKEN], SamplingParams(max_tokens=8, logprobs=1))
    sampled = engine.submit([5, 6], SamplingParams(max_tokens=8, temperature=1e-3))
    engine.run()
    assert (bad.finish_reason, bad.token_ids, bad.logprobs) == ("error", [], [])
    assert "the model's logits at position 1 hold no finite number or a NaN" in bad.error
    assert good.token_ids == expected([1, 2, 3], 8, 120)
    assert sampled.token_ids == expected([5, 6], 8, 120)
    assert good.error is None
    assert_idle(engine)


def test_abort_while_waiting_running_and_after_the_end() -> None:
    engine = make(max_batch=1)
    a, b, c = (engine.submit([i, i], SamplingParams(max_tokens=30)) for i in (1, 2, 3))
    engine.step()
    engine.abort(b)
    engine.step()
    engine.abort(a)
    assert (a.finish_reason, b.finish_reason, len(a.token_ids), b.token_ids) == ("abort", "abort", 2, [])
    engine.run()
    engine.abort(c)
    assert (c.finish_reason, len(c.token_ids)) == ("length", 30)
    assert_idle(engine)
    assert engine.step() == []


def test_a_model_that_raises_leaves_the_engine_usable() -> None:
    model = FakeModel()
    engine = make(model)
    r = engine.submit([1, 2, 3], SamplingParams(max_tokens=5))
    engine.step()
    good, model.choose = model.choose, lambda history: 1 // 0
    with pytest.raises(ZeroDivisionError):
        engine.step()
    model.choose = good
    engine.run()
    assert r.token_ids == expected([1, 2, 3], 5, 120)
    assert_idle(engine)


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_gives_the_same_tokens_in_any_batch(device) -> None:
    def tokens(company: int, chunk: int, **options) -> list[int]:
        engine = make(FakeModel(peak=1.0), device=device, chunk=chunk, max_batch=6)
        for i in range(company):
            engine.submit([i + 1] * (3 * i + 2), SamplingParams(max_tokens=9, temperature=0.7, top_k=5 + i, top_p=0.9, min_p=0.01))
        r = engine.submit([9, 8, 7], SamplingParams(max_tokens=24, temperature=1.0, **options))
        engine.run()
        return r.token_ids

    alone = tokens(0, 24, seed=5)
    assert tokens(5, 7, seed=5) == alone
    assert tokens(0, 24, seed=6) != alone
    assert tokens(0, 24) != tokens(0, 24)  # drawn at admission; equal with probability 61^-24
    assert len(set(alone)) > 3


def test_top_k_1_and_a_tiny_top_p_are_greedy_and_defaults_are() -> None:
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0.0, "top_p": 0.5}, {}):
        engine = make(FakeModel(peak=1.0))
        r = engine.submit([3, 1, 4], SamplingParams(max_tokens=10, **options))
        engine.run()
        assert r.token_ids == expected([3, 1, 4], 10, 120), options


def test_logprobs_where_asked() -> None:
    engine = make()
    plain = engine.submit([1, 2], SamplingParams(max_tokens=3))
    own = engine.submit([3, 4], SamplingParams(max_tokens=3, logprobs=0))
    top = engine.submit([5, 6, 7], SamplingParams(max_tokens=3, logprobs=4, temperature=0.5, seed=1))
    engine.run()
    # One logit of 9 among zeros: log p = 9 - log(e^9 + V - 1), or 0 - the same for any other token.
    norm = math.log(math.exp(9.0) + VOCAB - 1)
    assert plain.logprobs is None
    assert [p.token_id for p in own.logprobs] == own.token_ids
    assert all(p.top == () and p.rank == 1 and abs(p.logprob - (9 - norm)) < 1e-5 for p in own.logprobs)
    history = [5, 6, 7]
    for p in top.logprobs:
        best = hashed(history)
        assert abs(p.logprob - (9.0 * (p.token_id == best) - norm)) < 1e-5
        assert len(p.top) == 4
        assert p.top[0][0] == best
        history.append(p.token_id)
    assert history[3:] == top.token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ([], {}, "submit: the prompt is empty, expected at least one token"),
        ([1] * 120, {}, "submit: the prompt has 120 tokens, expected at most 119 (the context is 120 positions)"),
        ([1, VOCAB], {}, "submit: the prompt holds 61, expected token ids from 0 to 60"),
        ([1, -1], {}, "submit: the prompt holds -1, expected"),
        ([1, 2.0], {}, "submit: the prompt holds 2.0, expected"),
        ([True], {}, "submit: the prompt holds True, expected"),
        ([1], {"stop_token_ids": (61,)}, "submit: stop_token_ids holds 61, expected"),
        ([1] * 40, {"max_tokens": 42}, "need 81 tokens of KV cache (6 pages), the pool has 80 (5 pages)"),
    ],
)
def test_what_submit_refuses(prompt, options, text) -> None:
    engine = make(pages=6)
    with pytest.raises(ValueError) as caught:
        engine.submit(prompt, SamplingParams(**options))
    assert text in str(caught.value)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch": 0}, "Engine: max_batch is 0"),
        ({"chunk": 0}, "Engine: chunk is 0"),
        ({"max_batch": 1.5}, "Engine: max_batch is 1.5, expected an integer"),
        ({"page_size": 0}, "Engine: page_size is 0"),
        ({"eos_ids": ["a"]}, "Engine: eos_ids holds 'a', expected token ids"),
        ({"kv_dtype": torch.bfloat16}, "Engine: kv_dtype is torch.bfloat16, expected torch.float32 like dtype"),
        ({"kv_dtype": torch.float8_e4m3fn, "kv_scales": {99: ()}}, "KvPool: scales has slot 99, expected some of 3"),
        ({"device": "meta"}, "Engine: device is meta, expected cpu or cuda"),
        ({"max_tokens": 64}, "Engine: pages=40 and max_tokens=64 both size the KV pool"),
        ({"pages": None, "max_tokens": 0}, "Engine: max_tokens is 0"),
        ({"pages": 1}, "KvPool: pages is 1"),
        ({"max_length": 121}, "Engine: max_length (max_seq_len of LLM) is 121, expected at most the model's context of 120"),
        ({"page_size": 48}, "KvPool: page_size is 48, expected one of 16, 32, 64, 128"),
        ({"kv_dtype": torch.int16}, "Engine: kv_dtype is torch.int16, expected torch.float32 like dtype"),
    ],
)
def test_what_the_engine_refuses(options, text) -> None:
    with pytest.raises(ValueError) as caught:
        make(**options)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (([None],), "the prompt holds None, expected token ids"),
        ((5,), "the prompt is 5, expected token ids"),
        (([1], {"max_tokens": 3}), "params is {'max_tokens': 3}, expected SamplingParams"),
    ],
)
def test_arguments_of_another_type(args, text) -> None:
    with pytest.raises(ValueError, match=f"submit: {text}"):
        make().submit(*args)


def test_a_request_of_another_engine_is_not_aborted() -> None:
    mine, other = make(), make()
    request = mine.submit([1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(ValueError, match="abort: request 0 is not one of this engine's"):
        other.abort(request)
    mine.run()
    assert request.finish_reason == "length"


def test_a_context_far_beyond_the_pool_costs_nothing() -> None:
    engine = make(spec=FakeSpec(max_positions=2**40))
    request = engine.submit([1, 2], SamplingParams(max_tokens=5))
    engine.run()
    assert len(request.token_ids) == 5


def test_the_python_twins_serve_the_engine(monkeypatch) -> None:
    monkeypatch.setattr("pyllm.runtime.engine.BlockPool", pool.BlockPool)
    monkeypatch.setattr("pyllm.runtime.step.StepPacker", pack.StepPacker)
    engine = make(chunk=20)
    assert type(engine.pool) is pool.BlockPool
    requests = [engine.submit([n] * n, SamplingParams(max_tokens=20)) for n in (1, 16, 17, 40, 33, 5)]
    engine.run()
    assert all(r.token_ids == expected(r.prompt_token_ids, 20, 120) for r in requests)
    assert_idle(engine)


def test_the_twins_are_chosen_where_the_native_module_is_missing() -> None:
    code = "import sys; sys.modules['pyllm._runtime'] = None; from pyllm.runtime import host; print(host.NATIVE, host.BlockPool.__module__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "pyllm.twins.pool"]


def test_graph_sizes_pad_by_little() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(33) == [1, 2, 4, 8, 16, 24, 32, 33]
    for most in (7, 256, 300, 1024, 5000):
        sizes = graph_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == min(most, 1024)
        assert all(b - a <= max(8, a / 8) for a, b in itertools.pairwise(sizes))
    for name, bad in (("graph_sizes", [5]), ("mixed_sizes", [0]), ("graph_sizes", [True])):
        with pytest.raises(ValueError, match=f"Engine: {name} holds"):
            make(**{name: bad})


def test_the_pool_is_sized_in_pages_or_tokens_or_by_the_batch() -> None:
    assert make(pages=None, max_tokens=100).pool.total == 7
    assert make(pages=None, max_tokens=112).pool.total == 7
    assert make(pages=None, max_batch=3).pool.total == 3 * 8


def test_the_beginning_of_a_page_is_reused_by_a_copy() -> None:
    model = FakeModel()
    engine = make(model, partial=True, chunk=100)
    text = list(range(1, 41))
    asked = [text, [*text[:27], 50, 51, 52], [*text[:5], 50], text[:16], [9, *text], [*text[:27], 50, 9]]
    requests = []
    for prompt in asked:  # pages of 16: two full ones are known after the first
        requests.append(engine.submit(prompt, SamplingParams(max_tokens=3)))
        engine.run()
    assert [r.cached_tokens for r in requests] == [0, 27, 5, 15, 0, 28]
    assert [t for t, b, r in model.steps if t > 1] == [40, 3, 41]
    assert all(r.token_ids == expected(r.prompt_token_ids, 3, 120) for r in requests)
    assert_idle(engine)
    for options in ({"salt": "x"}, {"params": SamplingParams(max_tokens=3, prompt_logprobs=0)}):
        other = engine.submit(text, **{"params": SamplingParams(max_tokens=3)} | options)
        engine.run()
        assert other.cached_tokens == 0


def test_a_request_that_needs_every_page_does_not_wait_for_the_one_it_would_copy() -> None:
    """Nothing else runs, so nothing would ever give a page back: one that is held to be copied must not be the one that is missing."""
    for reserve in (True, False):
        model = FakeModel()
        engine = make(model, pages=4, partial=True, chunk=100, reserve=reserve)  # three pages, and each request needs three
        text = list(range(1, 41))
        asked = [text, [*text[:27], 50, 51, 52, 53, 54, 55], [*text[:5], 50], [*text[:5], *text[5:30], 50]]
        requests = []
        for prompt in asked:
            requests.append(engine.submit(prompt, SamplingParams(max_tokens=48 - len(prompt))))
            engine.run()
        for r in requests:
            assert (r.error, r.token_ids) == (None, expected(r.prompt_token_ids, r.params.max_tokens, 120))
        assert_idle(engine)


def test_full_chunks_have_one_size_and_the_sizes_of_a_graph() -> None:
    """Steps of a ramp count the generating requests in: all have the chunk's size, but the last, which is too small to be padded to it."""
    model = FakeModel()
    spec = FakeSpec(max_positions=700)
    engine = make(model, spec, pages=400, max_batch=8, chunk=1100, mixed_sizes=[1100])
    requests = [engine.submit([n % 50] * (420 + n), SamplingParams(max_tokens=4 + n)) for n in range(8)]
    engine.run()
    assert all(r.token_ids == expected(r.prompt_token_ids, 4 + i, 700) for i, r in enumerate(requests))
    prompts = sum(len(r.prompt_token_ids) for r in requests)
    steps = [s for s in model.steps if s[0] > 8]
    assert [t for t, _, _ in steps[:-1]] == [1100] * (len(steps) - 1)
    assert all(b in (4, 8) and r == max(b, 64) for _, b, r in steps[:-1])  # padded sequences; at least 64 rows of logits
    assert steps[-1][0] < 1100 * 15 / 16 and steps[-1][1] <= 8 and prompts > 3 * 1100
    assert_idle(engine)


def test_half_a_chunk_is_left_to_prompts() -> None:
    model = FakeModel()
    engine = make(model, pages=100, max_batch=13, chunk=8)
    for n in range(12):
        engine.submit([n, n], SamplingParams(max_tokens=60))
    while model.steps[-1:] != [(12, 12, 12)]:
        engine.step()
    engine.submit([9] * 10, SamplingParams(max_tokens=2))
    engine.step(), engine.step(), engine.step()
    assert [t for t, _, _ in model.steps[-3:]] == [16, 16, 14]  # 12 of them generated
    engine.run()


def test_shapes_of_captured_steps() -> None:
    assert mixed_shapes([8, 64], 33) == [(8, 8), (64, 8), (64, 33)]
    assert mixed_shapes([8192], 1000) == [(8192, 250), (8192, 500), (8192, 1000)]
    assert mixed_shapes([2048], 1) == [(2048, 1)]
    assert not wasteful(9, 16) and not wasteful(513, 1024)
    assert not wasteful(7680, 8192) and wasteful(7679, 8192) and wasteful(1100, 8192)
