"""More of what other engines' users have reported: what the cache of prefixes, its dtype, penalties and guessing must not change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pyllm import LLM, KvCacheConfig, SamplingParams
from pyllm.api.dummy import SHAPES, DummyWeights
from pyllm.layers import bind
from pyllm.models import spec_from_config
from pyllm.runtime.engine import Engine
from tests.runtime.tiny import CONFIG, VOCAB, save_tiny, tiny_spec, tiny_weights

WEIGHTS = tiny_weights(0)
PROMPTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(3, 103, 5)]
PROMPTS += [[*PROMPTS[-1][:50], *PROMPTS[n]] for n in range(5)]  # some begin alike


def logprobs_of(engine: Engine, prompts, **params) -> list:
    requests = [engine.submit(p, SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True, **params)) for p in prompts]
    engine.run()
    assert [r.error for r in requests] == [None] * len(requests)
    return requests


def test_no_piece_of_a_stream_is_empty_and_none_comes_twice(tmp_path) -> None:
    """A piece without a token would be one that a stop string or half a character holds back: it has tokens, and its text is new text."""
    cache = KvCacheConfig(max_tokens=1024, tokens_per_block=16)
    with LLM(save_tiny(tmp_path / "m"), device="cpu", kv_cache_config=cache, progress=False) as llm:
        for most in (1, 2, 7, 20):
            for stop in ((), ("\n\n\n", "never there")):
                params = SamplingParams(max_tokens=most, stop=stop, ignore_eos=True)
                looks = [
                    (c.token_ids_diff, c.text_diff) for look in llm.generate_async("abc", params, streaming=True) for c in look.outputs
                ]
                whole = llm.generate("abc", params, use_tqdm=False).outputs[0]
                assert [t for ids, _ in looks for t in ids] == whole.token_ids
                assert "".join(text for _, text in looks) == whole.text
                assert all(ids for ids, _ in looks[:-1])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
def test_cold_warm_and_without_reuse_are_close(kv_dtype) -> None:
    """Of first tokens: a prompt cut elsewhere rounds elsewhere (fp32), and a one-byte cache may step over a value: bound and median."""
    options = {"page_size": 16, "max_tokens": 4096, "max_batch": 4, "chunk": 64, "kv_dtype": kv_dtype}
    cached = Engine(tiny_spec(), WEIGHTS, partial=True, **options)
    without = Engine(tiny_spec(), WEIGHTS, reuse=False, **options)
    runs = [logprobs_of(engine, PROMPTS) for engine in (cached, cached, without)]
    assert sum(r.cached_tokens for r in runs[1]) > 0.8 * sum(len(p) - 1 for p in PROMPTS)
    firsts = torch.tensor([[r.logprobs[0].logprob for r in requests] for requests in runs])
    limit = 100 * 2**-24 * 10 * 2 if kv_dtype == torch.float32 else 0.3
    assert (firsts - firsts[:1]).abs().amax() < limit
    assert (firsts - firsts[:1]).abs().median() < 1e-4
    if kv_dtype == torch.float32:
        assert [r.token_ids for r in runs[1]] == [r.token_ids for r in runs[0]] == [r.token_ids for r in runs[2]]


def test_prompt_logprobs_cold_and_warm_are_the_same() -> None:
    engine = Engine(tiny_spec(), WEIGHTS, page_size=16, max_tokens=4096, max_batch=4, chunk=64, partial=True)
    cold = logprobs_of(engine, PROMPTS[8:12], prompt_logprobs=1)
    logprobs_of(engine, PROMPTS[8:12])  # the pages are known now
    warm = logprobs_of(engine, PROMPTS[8:12], prompt_logprobs=1)
    for a, b in zip(cold, warm, strict=True):
        assert a.prompt_logprobs[0] is b.prompt_logprobs[0] is None
        assert len(a.prompt_logprobs) == len(a.prompt_token_ids)
        assert [p.token_id for p in a.prompt_logprobs[1:]] == [p.token_id for p in b.prompt_logprobs[1:]] == a.prompt_token_ids[1:]
        ours, theirs = (np.array([p.logprob for p in r.prompt_logprobs[1:]]) for r in (a, b))
        assert np.abs(ours - theirs).max() < 100 * 2**-24 * 10 * 2


@pytest.mark.parametrize(("kv_dtype", "most"), [(torch.float8_e4m3fn, 0.02), (torch.int8, 0.02)])
def test_perplexity_with_a_one_byte_cache(kv_dtype, most) -> None:
    """Within 2 % of the model's own cache: mean log-probability of 2,000 tokens. e4m3 has 3 bits of mantissa; its scale here is 1."""
    mean = []
    module = bind(tiny_spec(), WEIGHTS)
    for dtype in (torch.float32, kv_dtype):
        engine = Engine(tiny_spec(), module, page_size=16, max_tokens=4096, max_batch=8, chunk=256, kv_dtype=dtype)
        requests = logprobs_of(engine, PROMPTS, prompt_logprobs=0)
        mean.append(np.mean([p.logprob for r in requests for p in r.prompt_logprobs[1:]]))
    assert abs(mean[1] / mean[0] - 1) < most


def test_penalties_in_a_batch_of_unequal_prompts_and_one_row_without() -> None:
    """Each as it is alone, guessing on or off (such steps guess nothing)."""
    each = [{"repetition_penalty": 1.5}, {}, {"presence_penalty": 0.8}, {"frequency_penalty": 0.7, "temperature": 0.9, "seed": 3}]
    prompts = [PROMPTS[i] for i in (0, 4, 9, 14)]
    options = {"page_size": 16, "max_tokens": 4096, "max_batch": 4, "chunk": 50}

    def run(engine, wanted):
        params = [SamplingParams(max_tokens=20, ignore_eos=True, **each[i]) for i in wanted]
        requests = [engine.submit(prompts[i], p) for i, p in zip(wanted, params, strict=True)]
        engine.run()
        return [r.token_ids for r in requests]

    alone = [run(Engine(tiny_spec(), WEIGHTS, **options), [i])[0] for i in range(4)]
    assert run(Engine(tiny_spec(), WEIGHTS, **options), range(4)) == alone
    assert run(Engine(tiny_spec(), WEIGHTS, draft_len=3, **options), range(4)) == alone
    plain = SamplingParams(max_tokens=20, ignore_eos=True)
    engine = Engine(tiny_spec(), WEIGHTS, **options)
    without = [engine.submit(p, plain) for p in prompts]
    engine.run()
    assert [r.token_ids == a for r, a in zip(without, alone, strict=True)] == [False, True, False, False]


def test_what_changes_no_output_may_be_combined() -> None:
    """Every pair of: parts of pages, a host tier, guessing (by lookup, by a second model), the deterministic mode, overlap, policy."""
    prompts = [list(b"To be or not to be, that is the question" + tail) for tail in (b"", b".", b": whether", b" again and again")] * 2
    small = spec_from_config(CONFIG | {"num_hidden_layers": 1})
    guesses = [{}, {"draft_len": 3}, {"draft_len": 3, "draft_model": (small, DummyWeights(small))}]
    want = None
    for partial, tiers, draft, how in itertools.product(
        [False, True], [(0, 0), (1 << 22, 10)], guesses, [{}, {"deterministic": True}, {"overlap": True}, {"reserve": False}]
    ):
        engine = Engine(
            tiny_spec(), WEIGHTS, page_size=16, max_tokens=320, max_batch=3, chunk=64, partial=partial, tiers=tiers, **draft, **how
        )  # fmt: skip
        requests = [engine.submit(p, SamplingParams(max_tokens=12, ignore_eos=True)) for p in prompts]
        engine.run()
        assert engine.pool.used == 0
        got = [r.token_ids for r in requests]
        want = want or got
        assert got == want, (partial, tiers, draft, how)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["lookup", "second"])
def test_on_a_gpu_guessing_with_graphs_is_guessing_without(model) -> None:
    """Batch sizes 1 to 9, around the captured ones. The same padded sizes in both, as those choose the matrix products."""
    from pyllm.runtime.graph import Graphs

    config = {k: v for k, v in SHAPES["llama-3.2-1b"].items() if k != "rope_scaling"}
    small = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    spec = spec_from_config(config | small | {"num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512})
    weights = DummyWeights(spec, "cuda", torch.bfloat16)
    options = {"device": "cuda", "dtype": torch.bfloat16, "max_batch": 9, "max_tokens": 8192, "chunk": 512, "reuse": False, "draft_len": 4}
    options |= {"draft_model": (spec, weights)} if model == "second" else {}
    options |= {"graph_sizes": [1, 2, 4, 8, 9], "mixed_sizes": [8, 64, 512]}
    captured = Engine(spec, weights, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "capture", lambda *args: None)
        eager = Engine(spec, weights, **options)
    for n in range(1, 10):
        got = []
        for engine in (captured, eager):
            requests = [engine.submit([i % 3, 1, 2, 3] * (i + 2), SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(n)]
            engine.run()
            assert [r.error for r in requests] == [None] * n
            got.append([r.token_ids for r in requests])
        assert got[0] == got[1], n
    assert captured.drafted == eager.drafted > 0
    assert captured.accepted == eager.accepted
