"""The engine over real layers: a tiny random Llama. Batched == alone == computed without any cache, whatever the chunks."""

from __future__ import annotations

import math

import pytest
import torch

from pyllm.api.params import SamplingParams
from pyllm.layers import bind
from pyllm.runtime.batch import Batch, KvCache
from pyllm.runtime.engine import Engine
from tests.runtime.tiny import CONFIG, VOCAB, tiny_spec, tiny_weights

LENGTHS = [1, 2, 15, 16, 17, 33, 5, 70]


@pytest.fixture(scope="module", params=[0, 1])
def weights(request) -> dict[str, torch.Tensor]:
    return tiny_weights(request.param)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Fixed, as the weights are: that tokens are equal holds while no two best logits are closer than fp32 rounding (the CPU's own matrix
    product depends on the number of rows), which fresh inputs would break once in some hundred runs."""
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in LENGTHS]


def run(weights, prompts, max_tokens: int = 18, each: list[SamplingParams] | None = None, **options):
    options = {"page_size": 16, "max_tokens": 2048, "max_batch": 16, "chunk": 4096} | options
    engine = Engine(tiny_spec(), weights, **options)
    for cache in engine.kv.caches.values():  # an unused key that is read makes every logit NaN
        for t in (cache.k, cache.v):
            t.copy_(torch.full(t.shape, math.nan))
    each = each or [SamplingParams(max_tokens=max_tokens, ignore_eos=True)] * len(prompts)
    requests = [engine.submit(p, s) for p, s in zip(prompts, each, strict=True)]
    engine.run()
    assert engine.pool.available == engine.pool.total
    assert [r.error for r in requests] == [None] * len(requests)
    return requests


def logits_without_cache(module, ids: list[int], dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None) -> torch.Tensor:
    """All rows of one sequence in one step on fresh pages of `dtype`."""
    n = len(ids)
    pages = -(-n // 16)
    at = torch.arange(n, dtype=torch.int32)
    kv = tiny_spec().kv_slots()
    caches = {
        s: KvCache(*(torch.full((pages, 16, k.kv_heads, k.head_dim), math.nan).to(dtype) for _ in range(2)), scale, scale)
        for s, k in kv.items()
    }
    starts, lens = torch.tensor([0, n], dtype=torch.int32), torch.tensor([n], dtype=torch.int32)
    with torch.inference_mode():
        return module(
            Batch(torch.tensor(ids, dtype=torch.int32), at, at, starts, lens, torch.arange(pages, dtype=torch.int32)[None], caches)
        )


def test_batched_is_alone(weights, prompts) -> None:
    together = run(weights, prompts)
    for r in together:
        assert run(weights, [r.prompt_token_ids])[0].token_ids == r.token_ids
    assert len({tuple(r.token_ids) for r in together}) == len(prompts)


@pytest.mark.parametrize(("chunk", "max_batch"), [(1, 3), (7, 16), (16, 2), (33, 16)])
def test_chunked_prefill_is_unchunked(weights, prompts, chunk, max_batch) -> None:
    want = [r.token_ids for r in run(weights, prompts)]
    assert [r.token_ids for r in run(weights, prompts, chunk=chunk, max_batch=max_batch)] == want


def test_every_greedy_token_is_the_best_of_logits_without_a_cache(weights, prompts) -> None:
    module = bind(tiny_spec(), weights)
    for r in run(weights, prompts, chunk=40):
        rows = logits_without_cache(module, r.prompt_token_ids + r.token_ids[:-1])[len(r.prompt_token_ids) - 1 :]
        assert rows.argmax(-1).tolist() == r.token_ids


def test_an_fp8_cache_stores_values_by_their_scales(weights, prompts) -> None:
    module, fp8 = bind(tiny_spec(), weights), torch.float8_e4m3fn
    scale = torch.tensor([0.05, 0.03])
    scales = dict.fromkeys(tiny_spec().kv_slots(), (scale, scale))
    each = [SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)] * len(prompts)
    for r in run(weights, prompts, each=each, chunk=40, kv_dtype=fp8, kv_scales=scales):
        ids, first = r.prompt_token_ids + r.token_ids[:-1], len(r.prompt_token_ids) - 1
        got = torch.tensor([p.logprob for p in r.logprobs])
        same, unscaled, fp32 = (
            logits_without_cache(module, ids, *how)[first:].log_softmax(-1)[range(len(got)), r.token_ids]
            for how in ((fp8, scale), (fp8, torch.ones(1)), ())
        )
        # fp32 rounding alone, except where it moves a value over an e4m3 step: rare, hence the median. Other caches are far off.
        assert (got - same).abs().median() < 1e-5
        assert (got - unscaled).abs().median() > 1e-3
        assert (got - fp32).abs().median() > 1e-3


def test_logprobs_are_those_of_logits_without_a_cache(weights, prompts) -> None:
    module = bind(tiny_spec(), weights)
    each = [SamplingParams(max_tokens=6, temperature=0.8, seed=i, logprobs=3, ignore_eos=True) for i in range(len(prompts))]
    for r in run(weights, prompts, each=each, chunk=40):
        rows = logits_without_cache(module, r.prompt_token_ids + r.token_ids[:-1])[len(r.prompt_token_ids) - 1 :]
        want = rows.double().log_softmax(-1)
        for p, row, token in zip(r.logprobs, want, r.token_ids, strict=True):
            assert p.token_id == token
            # Logits of about 10 in fp32 after ~100 operations of relative error 2^-24 each, differently ordered in a batch.
            assert abs(p.logprob - row[token].item()) < 100 * 2**-24 * 10 * 2
            assert p.rank == 1 + (row > row[token]).sum().item()
            assert [t for t, _ in p.top] == row.topk(3).indices.tolist()


def test_sampling_is_the_same_in_any_company(weights, prompts) -> None:
    each = [SamplingParams(max_tokens=12, temperature=1.1, top_k=40, top_p=0.95, seed=i, ignore_eos=True) for i in range(len(prompts))]
    together = run(weights, prompts, each=each, chunk=25)
    for r, params in zip(together, each, strict=True):
        assert run(weights, [r.prompt_token_ids], each=[params])[0].token_ids == r.token_ids


def test_the_context_can_be_filled(weights) -> None:
    r = run(weights, [[3] * 150], max_tokens=500)[0]
    assert (r.finish_reason, r.length) == ("length", CONFIG["max_position_embeddings"])


@pytest.mark.gpu
def test_on_a_gpu_each_greedy_token_is_within_a_bound_of_the_best(weights, prompts) -> None:
    rounded = {k: v.bfloat16().float() if v.dim() > 1 else v for k, v in weights.items()}
    module = bind(tiny_spec(), rounded)
    for r in run(weights, prompts, device="cuda", dtype=torch.bfloat16, chunk=40):
        rows = logits_without_cache(module, r.prompt_token_ids + r.token_ids[:-1])[len(r.prompt_token_ids) - 1 :]
        # bf16 keeps 2^-9 per rounding; 12 roundings along a layer's residual path, 2 layers, and both logits of the comparison move.
        slack = 2 * 12 * 2 * 2**-9 * rows.abs().amax(-1)
        best, chosen = rows.amax(-1), rows[torch.arange(len(rows)), torch.tensor(r.token_ids)]
        assert (chosen >= best - slack).all()
