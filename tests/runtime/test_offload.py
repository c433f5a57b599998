"""The host's memory behind the cache of prefixes, and events: what was given away is read again, never another's; what is told is so."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm import LLM, KvCacheConfig, SamplingParams
from pyllm.api.dummy import DummyWeights
from pyllm.models import spec_from_config
from pyllm.runtime.engine import Engine
from pyllm.runtime.offload import HostPages
from tests.runtime.fake import FakeDraft, FakeModel, FakeSpec, expected, hashed
from tests.runtime.test_draft import nearly, repeating
from tests.runtime.test_engine import assert_idle, make
from tests.runtime.tiny import CONFIG, VOCAB, tiny_spec, tiny_weights

PAGE = 2 * 16 * 2 * 8 * 4  # bytes of a page of the fake


def prompt_of(kind: int, n: int) -> list[int]:
    return np.random.default_rng(kind).integers(0, 59, 80).tolist()[:n]


def test_twenty_prompts_round_robin_in_a_tiny_pool_and_a_host_that_holds_them() -> None:
    """Tokens of other prompts with an offload tier: a bug report elsewhere. Each is its solo run, and read again."""
    model = FakeModel()
    engine = make(model, pages=9, max_batch=2, tiers=(100 * PAGE, 0))
    again = 0
    for _ in range(3):
        for kind in range(20):
            r = engine.submit(prompt_of(kind, 56), SamplingParams(max_tokens=5))
            engine.run()
            assert r.token_ids == expected(r.prompt_token_ids, 5, 120)
            again += r.cached_tokens
    assert again == 2 * 20 * 48
    assert_idle(engine)


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 4), st.sampled_from([1, 16, 17, 33, 60, 80]), st.sampled_from([1, 5, 20]), st.integers(0, 8)), max_size=12
    ),
    options=st.fixed_dictionaries(
        {
            "pages": st.sampled_from([9, 12]),
            "max_batch": st.sampled_from([1, 3]),
            "chunk": st.sampled_from([16, 40]),
            "overlap": st.booleans(),
            "reserve": st.booleans(),
            "partial": st.booleans(),
            "tiers": st.sampled_from([(2 * PAGE, 5), (6 * PAGE, 0), (99 * PAGE, 1000)]),
            "draft": st.booleans(),
            "deterministic": st.booleans(),
        }
    ),
    fails=st.booleans(),
)
def test_any_schedule_over_two_tiers(requests, options, fails) -> None:
    options = dict(options)
    if options.pop("draft"):
        options |= {"draft_len": 3, "draft_model": (FakeSpec(), FakeDraft(nearly)), "deterministic": False}
    if options["deterministic"]:
        options |= {"reserve": True}
    engine = make(FakeModel(choose=repeating), **options)
    live = []
    for step in range(10):
        for kind, n, most, at in requests:
            if at == step:
                live.append(engine.submit(prompt_of(kind, n), SamplingParams(max_tokens=most)))
        if fails and step == 5:
            engine.fail("as if a step had raised")
        engine.step()
    engine.run()
    for r in live:
        want = expected(r.prompt_token_ids, r.params.max_tokens, 120, repeating)
        assert r.token_ids == (want if r.error is None else want[: len(r.token_ids)])
    assert_idle(engine)


def test_events_say_what_the_cache_knows() -> None:
    engine = make(pages=9, max_batch=2, tiers=(0, 10_000))
    known: set[str] = set()
    seen = []
    for kind in (0, 1, 0, 2, 3, 0):
        engine.submit(prompt_of(kind, 60), SamplingParams(max_tokens=4))
        engine.run()
        for event in engine.pool.take_events():
            seen.append(event["event_id"])
            names = set(event["data"]["block_hashes"])
            if event["data"]["type"] == "stored":
                assert not names & known
                known |= names
            else:
                assert names <= known
                known -= names
        assert len(known) == engine.pool.cached
        assert {k for k in known if len(engine.pool.match(bytes.fromhex(k)))} == known
        for name in known:
            engine.pool.free(engine.pool.match(bytes.fromhex(name))[:1].repeat(2))
    assert seen == list(range(len(seen)))
    engine.fail("all is forgotten")
    assert sum(len(e["data"]["block_hashes"]) for e in engine.pool.take_events() if e["data"]["type"] == "removed") == len(known)


def test_the_host_gives_up_what_was_used_least_recently_but_not_what_is_being_read() -> None:
    host = HostPages(2)
    a, b, c = (bytes([i]) for i in range(3))
    assert [host.place(a, set()), host.place(b, set()), host.place(a, set())] == [0, 1, None]
    assert host.place(c, {1}) == 0  # b is older than a, but it is being read
    assert (host.find([b]), host.find([c, a]), host.find([a])) == ([1], [0], [])
    assert host.place(a, {0, 1}) is None
    host.clear()
    assert len(host) == 0
    assert {host.place(a, set()), host.place(b, set())} == {0, 1}


def test_through_the_api() -> None:
    cache = KvCacheConfig(max_tokens=128, tokens_per_block=16, host_cache_size=64 << 20, event_buffer_max_size=100)
    with LLM(tiny_spec(), weights=tiny_weights(0), device="cpu", max_batch_size=2, kv_cache_config=cache, progress=False) as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        prompts = [[n, *range(60)] for n in range(6)]
        first = [llm.generate(p, params, use_tqdm=False) for p in prompts]
        second = [llm.generate(p, params, use_tqdm=False) for p in prompts]
        assert [o.cached_tokens for o in second] == [48] * 6
        assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]
        events = llm.get_kv_cache_events()
        assert {e["data"]["type"] for e in events} == {"stored", "removed"}
        assert llm.get_kv_cache_events() == []
    plain = LLM(tiny_spec(), weights=tiny_weights(0), device="cpu", progress=False)
    with plain as llm, pytest.raises(ValueError, match="get_kv_cache_events: none are kept"):
        llm.get_kv_cache_events()
    with pytest.raises(ValueError, match="KvCacheConfig: host_cache_size is -1, expected an integer, at least 0"):
        KvCacheConfig(host_cache_size=-1)
    with pytest.raises(ValueError, match="Engine: host_bytes is 100, expected 0, or room for a page"):
        make(tiers=(100, 0))


def test_a_one_byte_cache_and_a_window() -> None:
    scales = {3: (torch.ones(1), torch.ones(1))}
    engine = Engine(FakeSpec(), FakeModel(), page_size=16, pages=9, chunk=40, kv_dtype=torch.int8, kv_scales=scales, tiers=(1 << 20, 0))
    for _ in range(2):
        for kind in range(5):
            r = engine.submit(prompt_of(kind, 56), SamplingParams(max_tokens=5))
            engine.run()
            assert r.token_ids == expected(r.prompt_token_ids, 5, 120, hashed)
    assert r.cached_tokens == 48
    spec = spec_from_config(CONFIG | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24})
    with pytest.raises(ValueError, match="Engine: host_bytes is 1048576, expected 0, or no layers with a window"):
        Engine(spec, DummyWeights(spec), page_size=16, max_batch=2, max_tokens=4000, chunk=30, tiers=(1 << 20, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_on_a_gpu_what_comes_back_is_what_went(kv_dtype) -> None:
    """In the deterministic mode, so that a prefix that was read and one that was computed give the same bits."""
    spec = spec_from_config(CONFIG | {"num_hidden_layers": 3, "max_position_embeddings": 2048})
    weights = DummyWeights(spec, "cuda", torch.bfloat16)
    options = {"device": "cuda", "dtype": torch.bfloat16, "kv_dtype": kv_dtype, "max_tokens": 1536, "max_batch": 2, "chunk": 128}
    g = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (600,), generator=g).tolist() for _ in range(6)]
    got = []
    for tiers in ((0, 0), (64 << 20, 0)):
        engine = Engine(spec, weights, deterministic=True, tiers=tiers, **options)
        cached = 0
        for _ in range(3):
            requests = [engine.submit(p, SamplingParams(max_tokens=20, logprobs=0, ignore_eos=True)) for p in prompts]
            engine.run()
            assert [r.error for r in requests] == [None] * 6
            got.append([(r.token_ids, r.logprobs) for r in requests])
            cached += sum(r.cached_tokens for r in requests)
        assert cached == (2 * 6 * 512 if tiers[0] else 0)
    assert all(g == got[0] for g in got)
