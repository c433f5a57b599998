"""The int8 cache: values within half a step of their scale, any schedule the same tokens, long chunks in pieces of 64 rows."""

from __future__ import annotations

import pytest
import torch

from pyllm import LLM, KvCacheConfig, SamplingParams
from pyllm.api.dummy import DummyWeights
from pyllm.layers import bind
from pyllm.models import spec_from_config
from pyllm.plan.calibrate import MARGIN, find_scales
from pyllm.runtime.engine import Engine
from tests.runtime.fake import FakeModel, FakeSpec, expected
from tests.runtime.tiny import CONFIG, VOCAB, tiny_spec, tiny_weights

WEIGHTS = tiny_weights(0)
CPU = torch.device("cpu")


def prompt_of(n: int) -> list[int]:
    return torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()


def run(prompts, dtype=torch.int8, most=8, **options):
    engine = Engine(tiny_spec(), WEIGHTS, page_size=16, max_tokens=2048, max_batch=8, kv_dtype=dtype, **options)
    for cache in engine.kv.caches.values():  # there is no NaN: what nobody stored is the largest number
        if dtype == torch.int8:
            cache.k[1:], cache.v[1:] = 127, -127
    requests = [engine.submit(p, SamplingParams(max_tokens=most, logprobs=0, prompt_logprobs=0, ignore_eos=True)) for p in prompts]
    engine.run()
    assert engine.pool.available == engine.pool.total
    return engine, requests


def test_scales_are_what_a_model_makes_and_a_margin() -> None:
    module = bind(tiny_spec(), WEIGHTS)
    scales = find_scales(module, tiny_spec(), torch.float32, torch.int8, 16, CPU)
    assert find_scales(module, tiny_spec(), torch.float32, torch.float32, 16, CPU) is None
    assert sorted(scales) == sorted(tiny_spec().kv_slots())
    plain, _ = run([prompt_of(140)], torch.float32)
    for number, (k, v) in scales.items():
        cache = plain.kv.caches[number]
        for scale, values in ((k, cache.k), (v, cache.v)):
            assert scale.shape == (CONFIG["num_key_value_heads"],)
            most = values[1:10].flatten(0, 1)[:140].abs().amax((0, 2))
            assert (most < 1.3 * 127 / MARGIN * scale).all()  # other tokens, but of the same size
            assert (most > 0.5 * 127 / MARGIN * scale).all()


def test_what_is_stored_is_within_half_a_step() -> None:
    prompt = prompt_of(100)
    engine, _ = run([prompt], chunk=512, most=1)
    plain, _ = run([prompt], torch.float32, most=1, chunk=512)
    first = min(engine.kv.caches)  # keys of the first layer do not depend on what attention read
    for name in ("k", "v"):
        stored, scale = getattr(engine.kv.caches[first], name), getattr(engine.kv.caches[first], f"{name}_scale")
        got = (stored[1:7].float() * scale[:, None]).flatten(0, 1)[:96]
        want = getattr(plain.kv.caches[first], name)[1:7].flatten(0, 1)[:96].clamp(-127 * scale[:, None], 127 * scale[:, None])
        assert ((got - want).abs() <= 0.501 * scale[:, None]).all()


@pytest.mark.parametrize("chunk", [16, 63, 64, 65, 200, 512])
def test_chunks_of_any_length_give_the_same_logprobs(chunk) -> None:
    """Pieces of 64 rows over one page table; fp32 rounding moves few values over a step of int8, hence the median."""
    prompts = [prompt_of(n) for n in (130, 65, 1, 64)]
    _, want = run(prompts, chunk=16)
    _, got = run(prompts, chunk=chunk)
    for a, b in zip(want, got, strict=True):
        ours, theirs = (torch.tensor([p.logprob for p in (*r.prompt_logprobs[1:], *r.logprobs)]) for r in (a, b))
        assert (ours - theirs).abs().median() < 1e-4
        assert len(a.token_ids) == len(b.token_ids) == 8


def test_it_is_close_to_the_models_own_cache_and_not_it() -> None:
    prompts = [prompt_of(n) for n in (130, 40)]
    logprobs = []
    for dtype in (torch.float32, torch.int8):
        _, requests = run(prompts, dtype, most=1, chunk=512)
        logprobs.append(torch.tensor([p.logprob for r in requests for p in r.prompt_logprobs[1:]]))
    error = (logprobs[0] - logprobs[1]).abs()
    assert 1e-5 < error.median() < 0.2  # an int8 step is 1/100 of the largest value, in 2 layers with logits of a few units


def test_the_checking_fake_over_an_int8_cache() -> None:
    scales = {3: (torch.ones(1), torch.ones(1))}
    engine = Engine(
        FakeSpec(), FakeModel(), page_size=16, pages=30, max_batch=3, chunk=40, kv_dtype=torch.int8, kv_scales=scales, partial=True
    )
    requests = [engine.submit([n] * n, SamplingParams(max_tokens=20)) for n in (1, 16, 17, 40, 33, 5)]
    engine.run()
    assert all(r.token_ids == expected(r.prompt_token_ids, 20, 120) for r in requests)


def test_through_the_api_and_what_it_cannot_be() -> None:
    cache = KvCacheConfig(max_tokens=512, tokens_per_block=16, dtype="int8")
    with LLM(tiny_spec(), weights=WEIGHTS, device="cpu", kv_cache_config=cache, progress=False) as llm:
        assert llm._engine.kv.dtype == torch.int8
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=4), use_tqdm=False).outputs[0].length == 4
    from pyllm.api.checks import check_int8

    with pytest.raises(ValueError, match=r"an int8 cache with torch.float32 and head dims \[8\], expected bfloat16 or float16"):
        check_int8(FakeSpec(), torch.float32, True)
    with pytest.raises(ValueError, match="Engine: mixed_sizes .* with an int8 cache, expected none"):
        run([], mixed_sizes=[8])
    with pytest.raises(ValueError, match="KvCacheConfig: dtype is 'int4', expected one of auto, fp8, int8"):
        KvCacheConfig(dtype="int4")


@pytest.mark.gpu
def test_on_a_gpu_it_is_close_to_the_models_own_cache() -> None:
    """Graphs, chunks in pieces, decodes beside them: teacher-forced log-probabilities against a bf16 cache."""
    spec = spec_from_config(CONFIG | {"num_hidden_layers": 4, "max_position_embeddings": 1024})
    module = bind(spec, DummyWeights(spec, "cuda", torch.bfloat16), device="cuda", dtype=torch.bfloat16)
    prompts = [prompt_of(n) for n in (700, 64, 65, 3, 300)]
    each = []
    for dtype in (torch.bfloat16, torch.int8):
        engine = Engine(spec, module, device="cuda", dtype=torch.bfloat16, kv_dtype=dtype, page_size=64, max_tokens=8192, chunk=256)
        params = SamplingParams(max_tokens=30, prompt_logprobs=0, ignore_eos=True)
        requests = [engine.submit(p, params) for p in prompts]
        engine.run()
        assert [r.error for r in requests] == [None] * len(prompts)
        assert all(len(r.token_ids) == 30 for r in requests)
        each.append([torch.tensor([p.logprob for p in r.prompt_logprobs[1:]]) for r in requests])
    for plain, ours in zip(*each, strict=True):
        error = (plain - ours).abs()
        assert error.median() < 0.1
        assert error.max() < 2.0
