"""Layers with a window hold what it reaches, find it there in any schedule, and share prefixes for as long as those are there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm.api.dummy import DummyWeights
from pyllm.api.params import SamplingParams
from pyllm.api.retention import KvCacheRetentionConfig
from pyllm.models import spec_from_config
from pyllm.plan.memory import OVERHEAD, memory_plan
from pyllm.plan.pages import pages_within, window_needs
from pyllm.runtime.batch import Batch
from pyllm.runtime.engine import Engine
from pyllm.runtime.kv import KvPool
from pyllm.runtime.windows import WindowPages
from tests.runtime.fake import NAN_TOKEN, FakeDraft, FakeModel, FakeSpec, expected
from tests.runtime.test_draft import nearly, repeating
from tests.runtime.test_engine import assert_idle, make
from tests.runtime.test_retention import ALL, CONFIGS, NONE, Range
from tests.runtime.tiny import CONFIG, VOCAB

WINDOW = 20


class WindowSpec(FakeSpec):
    """The fake's slot, and one more with a window."""

    def kv_slots(self):
        return super().kv_slots() | {4: SimpleNamespace(kv_heads=1, head_dim=8, window=WINDOW)}


class WindowFake(FakeModel):
    """Checks, beside all that the fake checks, that each row finds in slot 4 the positions and tokens of its window."""

    def __call__(self, b: Batch) -> torch.Tensor:
        plain = b.caches[3]
        cache = b.caches[4]
        table, slots = b.paged(cache)
        assert (slots < 0).equal(b.slots < 0)
        k, size = cache.k.view(-1, *cache.k.shape[2:]), cache.k.shape[1]
        used = int(b.q_starts[-1])
        written = slots[:used][slots[:used] > 0].tolist()
        assert all(s >= size for s in written), "a token of a request goes to the dummy page"
        assert len(set(written)) == len(written)
        k[slots[:used].long(), 0, 0] = b.ids[:used].float()
        k[slots[:used].long(), 0, 1] = b.positions[:used].float()
        logits = super().__call__(replace(b, caches={3: plain}, _paged={}))
        full = plain.k.view(-1, *plain.k.shape[2:])
        for i, length in enumerate(b.kv_lens.tolist()):
            n = int(b.q_starts[i + 1] - b.q_starts[i])
            if n and b.page_table[i].any():
                seen = torch.arange(max(length - n - WINDOW + 1, 0), length)
                at, other = (t[i, seen // size].long() * size + seen % size for t in (table, b.page_table))
                assert k[at, 0, 1].tolist() == seen.tolist(), "a position of a window is not there"
                assert k[at, 0, 0].equal(full[other, 0, 0])
        return logits


@settings(max_examples=100)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([1, 2, 15, 16, 17, 33, 60, 90]), st.sampled_from([1, 2, 16, 40, 500]), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    ),
    options=st.fixed_dictionaries(
        {
            "pages": st.sampled_from([9, 14, 40]),
            "max_batch": st.sampled_from([1, 2]),
            "chunk": st.sampled_from([7, 16, 40]),
            "overlap": st.booleans(),
            "reserve": st.booleans(),
            "draft": st.sampled_from([None, "lookup", "model"]),
            "deterministic": st.booleans(),
            "graph_sizes": st.sampled_from([(), (1,)]),
            "mixed_sizes": st.sampled_from([(), (8,)]),
        }
    ),
    alike=st.booleans(),
    abort=st.sampled_from([None, 3]),
    worth=st.lists(CONFIGS, min_size=3, max_size=3),
)
def test_any_schedule_finds_its_windows(requests, options, alike, abort, worth) -> None:
    draft, options = options.pop("draft"), dict(options)
    if draft:
        options |= {"draft_len": 3, "deterministic": False}
        options |= {"draft_model": (FakeSpec(), FakeDraft(nearly))} if draft == "model" else {}
    if options["deterministic"]:
        options |= {"reserve": True, "chunk": max(options["chunk"], 16), "graph_sizes": (), "mixed_sizes": ()}
    engine = make(WindowFake(choose=repeating), WindowSpec(), **options)
    rng, live = np.random.default_rng(len(requests)), []
    text = rng.integers(0, 59, 100).tolist()
    for step in range(12):
        for n, most, at in requests:
            if at == step:
                prompt = text[:n] if alike else rng.integers(0, 59, n).tolist()
                live.append(engine.submit(prompt, SamplingParams(max_tokens=most)))
                live[-1].retention = worth[len(live) % 3]
        if step == abort and live:
            engine.abort(live[0])
        engine.step()
    engine.run()
    for r in live:
        want = expected(r.prompt_token_ids, r.params.max_tokens, 120, repeating)
        assert r.token_ids == (want if r.finish_reason != "abort" else want[: len(r.token_ids)])
    assert_idle(engine)


def test_a_long_request_needs_no_more_than_its_window() -> None:
    """120 tokens are 8 pages; the windowed slot has 6 places for one request, which goes through all of its pages."""
    engine = make(WindowFake(), WindowSpec(), max_batch=1, chunk=16, pages=40)
    assert engine.kv.caches[3].k.shape[0] == 40
    assert engine.kv.caches[4].k.shape[0] == 1 + (2 + 2) + 2
    assert engine.kv.bytes == sum(t.nbytes for c in engine.kv.caches.values() for t in (c.k, c.v))
    for n in (100, 3, 110):
        r = engine.submit([n % 50] * n, SamplingParams(max_tokens=500))
        engine.run()
        assert r.token_ids == expected(r.prompt_token_ids, 500, 120)
    assert_idle(engine)


def test_a_prefix_is_reused_while_the_end_of_it_is_there() -> None:
    engine = make(WindowFake(), WindowSpec(), max_batch=1, chunk=16, pages=60)
    prompt = np.random.default_rng(0).integers(0, 59, 80).tolist()
    got = []
    for between in (0, 0, 90):
        if between:
            engine.submit([5] * between, SamplingParams(max_tokens=1))
        got.append(engine.submit(prompt, SamplingParams(max_tokens=2)))
        engine.run()
    assert [r.cached_tokens for r in got[:2]] == [0, 64]
    assert got[2].cached_tokens == 0  # its places were given to others, although its pages are still known
    assert engine.pool.cached > 5
    assert len({tuple(r.token_ids) for r in got}) == 1


@pytest.mark.parametrize(
    ("first", "other", "kept"),
    [
        (None, None, 0),
        (ALL, None, 64),
        (NONE, None, 0),
        (ALL, ALL, 0),  # among equals the oldest goes
        (None, NONE, 64),
        (KvCacheRetentionConfig([Range(48, 64, 90)]), None, 64),  # the page before is read with it, so it is worth as much
        (KvCacheRetentionConfig([Range(0, 32, 90)]), None, 32),  # the first 32 tokens, and nothing behind them
    ],
)
def test_places_of_high_priority_stay(first, other, kept: int) -> None:
    """6 places: a prompt leaves 2 that its reuse needs; another one of 80 tokens goes through as many as it can get."""
    engine = make(WindowFake(), WindowSpec(), max_batch=1, chunk=16, pages=60)
    prompt = np.random.default_rng(0).integers(0, 59, 80).tolist()
    for ids, config in ((prompt, first), ([5] * 90, other), (prompt, None)):
        request = engine.submit(ids, SamplingParams(max_tokens=2))
        request.retention = config
        engine.run()
        assert_idle(engine)
    assert request.cached_tokens == kept
    assert request.token_ids == expected(prompt, 2, 120)


def test_a_place_is_free_when_its_page_goes_to_somebody_else() -> None:
    window = WindowPages(WINDOW, 4, 20, 16, torch.device("cpu"))
    dear, plain = np.array([3, 4], np.int32), np.array([5], np.int32)
    window.take(dear)
    window.drop(dear, np.array([90, 90], np.int32))
    window.take(plain)
    window.drop(plain, None)
    window.renew(dear[:1], 35)
    assert window.of[[3, 4, 5]].tolist() == [0, 2, 3]
    window.take(np.array([6, 7], np.int32))  # the free place, then that of the lowest priority
    assert window.of[[4, 5, 6, 7]].tolist() == [2, 0, 1, 3]
    window.check()


def test_nothing_is_worth_a_place_when_no_page_is_known_any_more() -> None:
    engine = make(WindowFake(), WindowSpec(), max_batch=2, chunk=16, pages=60)
    requests = [engine.submit([n] * 50, SamplingParams(max_tokens=2)) for n in (1, NAN_TOKEN)]
    requests[0].retention = ALL
    engine.run()
    assert [r.finish_reason for r in requests] == ["length", "error"]
    (window,) = engine._scheduler.windows.each.values()
    assert (window.of > 0).sum() <= 4  # of pages that were in use when the other request failed
    assert_idle(engine)
    again = engine.submit([1] * 50, SamplingParams(max_tokens=2))
    engine.run()
    assert again.token_ids == requests[0].token_ids


def test_pages_for_a_given_memory() -> None:
    slots = WindowSpec().kv_slots()
    full, small = (KvPool({n: s}, 2, 16, torch.float32).bytes // 2 for n, s in slots.items())
    assert window_needs(slots, 16, 2, 16, 100) == {WINDOW: 1 + 2 * 4 + 1}
    assert window_needs(slots, 16, 2, 16, 10) == {}
    assert pages_within(slots, 16, torch.float32, 2, 16, 5 * (full + small), 0) == 5
    room = 10 * small + 50 * full
    assert pages_within(slots, 16, torch.float32, 2, 16, room, 0) == 50
    assert pages_within(slots, 16, torch.float32, 2, 16, room + 50 * 7, 7) == 50
    assert pages_within(slots, 16, torch.float32, 2, 16, 0, 0) == 2


def test_a_lost_place_is_seen() -> None:
    window = WindowPages(WINDOW, 6, 20, 16, torch.device("cpu"))
    assert [window.first(p) for p in (0, 34, 35, 50, 51)] == [0, 0, 1, 1, 2]
    window.take(np.array([3, 4], np.int32))
    window.check()
    window.flush()
    assert window.map[[3, 4]].tolist() == window.of[[3, 4]].tolist() == [1, 2]
    window.of[4] = 1
    with pytest.raises(RuntimeError, match="places of the window 20 are lost"):
        window.check()


@pytest.mark.parametrize("windows", [{"sliding_window": 24}, {"sliding_window": 24, "layers": 2}])
def test_a_real_model_says_the_same_with_fewer_places(windows) -> None:
    """All layers with a window (Mistral), or every second one; against a pool too small for the map to be worth it."""
    layers = windows.pop("layers", None)
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    spec = spec_from_config(CONFIG | names | windows | {"torch_dtype": "float32"})
    if layers:
        from pyllm.layers import Attn, rewrite

        spec = rewrite(spec, Attn, lambda a: replace(a, window=None if a.kv % 2 else 24))
    prompts = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 40, 70, 100)]
    got = []
    for options in ({"max_batch": 2, "max_tokens": 4000, "chunk": 30}, {"max_batch": 60, "max_tokens": 320, "chunk": 30}):
        engine = Engine(spec, DummyWeights(spec), page_size=16, **options)
        for cache in engine.kv.caches.values():
            cache.k[1:], cache.v[1:] = torch.nan, torch.nan
        requests = [engine.submit(p, SamplingParams(max_tokens=40, ignore_eos=True)) for p in prompts]
        engine.run()
        assert_idle(engine)
        got.append([r.token_ids for r in requests])
        sizes = {c.k.shape[0] for c in engine.kv.caches.values()}
        assert sizes == ({21} if options["max_batch"] == 60 else {251, 11} if layers else {11})
    assert got[0] == got[1]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("room", [300_000, 3_000_000, 10**9])
def test_the_memory_plan_is_what_an_engine_takes(monkeypatch, room: int, every: int) -> None:
    """A page of 16 tokens takes 16 KiB a layer: room for 9 pages of both layers, for all places of a window, and for all there can be."""
    from pyllm.layers import Attn, rewrite

    spec = spec_from_config(CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": 24, "max_position_embeddings": 4096})
    spec = rewrite(spec, Attn, lambda a: replace(a, window=None if every == 2 and a.kv % 2 else 24))
    sizes = {"dtype": torch.float32, "kv_dtype": torch.float32, "max_batch": 2, "page_size": 16}
    nothing = memory_plan(spec, 1, tokens=30, fraction=0.5, **sizes)
    assert (nothing.kv, nothing.tokens, str(nothing).endswith("does not fit")) == (0, 0, True)
    total = nothing.weights + nothing.activations + OVERHEAD + 2 * room
    planned = memory_plan(spec, total, tokens=30, fraction=0.5, **sizes)
    monkeypatch.setattr("pyllm.runtime.engine.free_bytes", lambda device: total - nothing.weights - OVERHEAD)
    engine = Engine(spec, DummyWeights(spec), chunk=30, memory_share=0.5, spare_bytes=nothing.activations, **sizes)
    assert (planned.kv, planned.tokens) == (engine.kv.bytes, 16 * engine.pool.total)
    assert planned.enough == (room == 10**9 or (every == 1 and room == 3_000_000))
    small = sum(t.nbytes for c in engine.kv.caches.values() if c.pages is not None for t in (c.k, c.v))
    assert (planned.windows, f"{planned.tokens:,} tokens" in str(planned)) == (small, True)
    assert (small > 0) == (room > 300_000)


@pytest.mark.gpu
def test_on_a_gpu_places_change_no_token() -> None:
    """The same steps, once with more pages than a window needs, once with as few; graphs, a windowed and a full layer in turn."""
    from pyllm.layers import Attn, rewrite

    config = CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100, "num_hidden_layers": 4}
    spec = spec_from_config(config | {"max_position_embeddings": 2048})
    spec = rewrite(spec, Attn, lambda a: replace(a, window=None if a.kv % 2 else 100))
    weights, got = DummyWeights(spec, "cuda", torch.bfloat16), []
    for chunk in (64, 8192):
        engine = Engine(spec, weights, device="cuda", dtype=torch.bfloat16, page_size=16, max_batch=3, max_tokens=4000, chunk=chunk)
        for cache in engine.kv.caches.values():
            cache.k[1:], cache.v[1:] = torch.nan, torch.nan
        requests = [engine.submit([n, n + 1, n + 2], SamplingParams(max_tokens=600, ignore_eos=True)) for n in (1, 50, 90)]
        engine.run()
        assert_idle(engine)
        got.append([(r.error, r.token_ids) for r in requests])
        assert {c.k.shape[0] for c in engine.kv.caches.values()} == ({251, 1 + 3 * 9 + 5} if chunk == 64 else {251})
    assert got[0] == got[1]
    assert got[0][0][0] is None
