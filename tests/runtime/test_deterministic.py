"""The deterministic mode: log-probabilities, bit for bit, whatever else is in the batch, in the cache, or aborted; what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm import LLM, KvCacheConfig, SamplingParams, SchedulerConfig
from pyllm.api.dummy import SHAPES, DummyWeights
from pyllm.layers import bind
from pyllm.layers.apart import apart
from pyllm.models import spec_from_config
from pyllm.runtime.engine import Engine
from tests.runtime.fake import FakeModel, expected
from tests.runtime.test_engine import assert_idle, make
from tests.runtime.tiny import CONFIG, VOCAB, tiny_spec, tiny_weights

PARAMS = [
    {"logprobs": 0},
    {"logprobs": 2, "temperature": 1.0, "seed": 3, "top_k": 20},
    {"logprobs": 0, "repetition_penalty": 1.3},
    {"logprobs": 0, "prompt_logprobs": 0},
]
WEIGHTS = tiny_weights(0)


def prompt_of(n: int, kind: int) -> list[int]:
    """kind 0 and 1: beginnings of two texts, which share pages; others are their own."""
    g = torch.Generator().manual_seed(kind if kind < 2 else 100 * n + kind)
    return torch.randint(0, VOCAB, (120,), generator=g).tolist()[:n]


def tiny(**options) -> Engine:
    common = {"page_size": 16, "max_tokens": 640, "max_batch": 4, "chunk": 40, "deterministic": True}
    return Engine(tiny_spec(), WEIGHTS, **(common | options))


def submit(engine: Engine, n: int, kind: int, how: int, most: int = 6):
    return engine.submit(prompt_of(n, kind), SamplingParams(max_tokens=most, ignore_eos=True, **PARAMS[how]))


def bits(request) -> tuple:
    return request.token_ids, request.logprobs, request.prompt_logprobs


_ALONE: dict = {}


def alone(*what: int) -> tuple:
    if what not in _ALONE:
        engine = tiny()
        request = submit(engine, *what)
        engine.run()
        _ALONE[what] = bits(request)
    return _ALONE[what]


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([1, 2, 15, 16, 17, 33, 64, 90]), st.integers(0, 2), st.integers(0, 3), st.integers(0, 6)),
        min_size=2,
        max_size=7,
    ),
    abort=st.sampled_from([None, 2, 5]),
    overlap=st.booleans(),
    reuse=st.booleans(),
)
def test_bits_do_not_depend_on_company_cache_and_time(requests, abort, overlap, reuse) -> None:
    engine = tiny(overlap=overlap, reuse=reuse)
    live = []
    for step in range(10):
        for n, kind, how, at in requests:
            if at == step:
                live.append(((n, kind, how), submit(engine, n, kind, how)))
        if step == abort and live:
            engine.abort(live[0][1])
        engine.step()
    engine.run()
    for what, request in live:
        assert request.error is None
        if request.finish_reason != "abort":
            assert bits(request) == alone(*what)
    assert_idle(engine)


@pytest.mark.parametrize("draft_model", [None, (tiny_spec(), WEIGHTS), (tiny_spec(), tiny_weights(5))])
@pytest.mark.parametrize("graphs", [{}, {"graph_sizes": [4], "mixed_sizes": [8, 40]}])
def test_guessing_leaves_the_same_bits_in_the_cache(draft_model, graphs) -> None:
    """Tokens, and all keys and values: what is verified is computed as it would be without guesses."""
    prompts, got = [[7] * 30, [1, 2, 3] * 9, prompt_of(20, 5)], []
    for options in ({}, {"draft_len": 4, "draft_model": draft_model, **graphs}):
        each = []
        for company in ([], prompts[:2]):
            engine, pages = tiny(**options), None
            requests = [engine.submit(p, SamplingParams(max_tokens=50, ignore_eos=True)) for p in (prompts[2], *company)]
            while not requests[0].finished:
                engine.step()
                pages = requests[0].pages if len(requests[0].pages) else pages
            known = requests[0].length - 1
            keys = [t[pages].flatten(0, 1)[:known].clone() for c in engine.kv.caches.values() for t in (c.k, c.v)]
            engine.run()
            each.append((requests[0].token_ids, keys))
        assert (engine.drafted > 0) == bool(options)
        got += each
    for tokens, keys in got[1:]:
        assert tokens == got[0][0]
        assert all(torch.equal(a, b) for a, b in zip(keys, got[0][1], strict=True))


def test_a_reused_prefix_has_the_bits_of_a_computed_one() -> None:
    engine = tiny()
    got = []
    for _ in range(2):
        got.append(submit(engine, 90, 0, 0))
        engine.run()
    assert [r.cached_tokens for r in got] == [0, 64]  # whole cells of 32 tokens: the chunk of 40, in pages of 16
    assert bits(got[0]) == bits(got[1]) == alone(90, 0, 0)


def test_what_was_generated_is_computed_anew_as_a_prompt() -> None:
    """A token's keys have other bits when it was generated than when it is given."""
    engine = tiny()
    first = submit(engine, 20, 0, 0, most=50)
    engine.run()
    got = []
    for used in (engine, tiny()):
        got.append(used.submit([*prompt_of(20, 0), *first.token_ids], SamplingParams(max_tokens=6, logprobs=0)))
        used.run()
    assert bits(got[0]) == bits(got[1])


def test_each_sequence_is_a_call_of_its_own_on_a_cpu() -> None:
    calls = []
    module = bind(tiny_spec(), WEIGHTS)

    def watched(batch):
        calls.append((len(batch.kv_lens), batch.max_q))
        return module(batch)

    engine = Engine(tiny_spec(), watched, page_size=16, max_tokens=640, max_batch=4, chunk=40, deterministic=True)
    for n in (50, 3, 20):
        submit(engine, n, 2, 0, most=2)
    engine.run()
    assert calls == [(1, 32), (1, 3), (1, 18), (1, 20), (1, 1), (1, 1), (1, 1)]


def test_apart_gives_the_rows_in_their_order() -> None:
    model = FakeModel()
    engine = make(apart(model), chunk=40)
    requests = [engine.submit(list(range(n)), SamplingParams(max_tokens=5, prompt_logprobs=0)) for n in (1, 17, 30)]
    engine.run()
    assert all(r.token_ids == expected(r.prompt_token_ids, 5, 120) for r in requests)
    assert {b for _, b, _ in model.steps} == {1}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheduler_config": SchedulerConfig(capacity_scheduler_policy="MAX_UTILIZATION")}, r"with reserve=False \(MAX_UTILIZATION\)"),
        ({"max_num_tokens": 15}, "chunk is 15, expected at least a page of 64 tokens"),
    ],
)
def test_what_does_not_go_with_it(options, text) -> None:
    with pytest.raises(ValueError, match=text):
        LLM(tiny_spec(), weights=WEIGHTS, device="cpu", deterministic=True, progress=False, **options)


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({}, {"dtype": torch.float32}, "with dtype torch.float32, expected bfloat16 or float16"),
        ({"head_dim": 80}, {}, "head_dim is 80, expected one of 64, 96, 128, 192, 256"),
        ({"vocab_size": 260}, {}, r"a tied head of \[260, 64\]"),
        ({"intermediate_size": 100}, {}, r"gate_proj|mlp.*\[200, 64\]|expected multiples of 8"),
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
            {},
            "the products of a MoE may depend on the other tokens of a step",
        ),
    ],
)
def test_what_has_no_such_kernel_on_cuda(change, options, text) -> None:
    from pyllm.layers.invariant import check_invariant

    check_invariant(spec_from_config(CONFIG), (), torch.bfloat16)
    with pytest.raises(ValueError, match=f"bind: invariant=True .*{text}"):
        check_invariant(spec_from_config(CONFIG | change), (), options.get("dtype", torch.bfloat16))


def test_through_the_api(tmp_path) -> None:
    with LLM(tiny_spec(), weights=WEIGHTS, device="cpu", deterministic=True, progress=False,
             kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=16), max_num_tokens=32) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0, ignore_eos=True)
        one = llm.generate(prompt_of(40, 5), params, use_tqdm=False)
        many = llm.generate([prompt_of(40, 5), *(prompt_of(n, 6) for n in range(1, 32))], params, use_tqdm=False)
    assert many[0].outputs[0].logprobs == one.outputs[0].logprobs


GPU_CONFIG = {k: v for k, v in SHAPES["llama-3.2-1b"].items() if k != "rope_scaling"} | {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("quant", ["", "fp8"])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_on_a_gpu_bits_do_not_depend_on_company(quant, kv) -> None:
    """Alone and among 70 others of many lengths, with graphs and overlap: equal tokens and bit-equal log-probabilities."""
    spec = spec_from_config(GPU_CONFIG)
    cache = KvCacheConfig(max_tokens=65536, dtype=kv)
    with LLM(spec, load_format="dummy", device="cuda", dtype="bf16", deterministic=True, progress=False, quant=quant or (),
             max_batch_size=80, max_num_tokens=2048, kv_cache_config=cache) as llm:  # fmt: skip
        g = torch.Generator().manual_seed(0)
        prompts = [torch.randint(0, 4096, (n,), generator=g).tolist() for n in (1, 5, 9, 70, 513, 1500)]
        others = [torch.randint(0, 4096, (1 + 7 * i % 900,), generator=g).tolist() for i in range(70)]
        each = [SamplingParams(max_tokens=40, logprobs=0, ignore_eos=True, temperature=t, seed=4) for t in (0.0, 1.0)]
        alone = [[llm.generate(p, s, use_tqdm=False).outputs[0].logprobs for p in prompts] for s in each]
        for salt in ("", "fresh"):
            for params, want in zip(each, alone, strict=True):
                got = llm.generate([*others, *prompts], params, use_tqdm=False, cache_salt=salt)
                assert [o.outputs[0].logprobs for o in got[len(others) :]] == want


@pytest.mark.gpu
def test_on_a_gpu_guessing_changes_no_bit() -> None:
    spec = spec_from_config(GPU_CONFIG)
    weights = DummyWeights(spec, "cuda", torch.bfloat16)
    prompts, got = [[5, 6, 7, 8] * 30, [9] * 64, list(range(100))], []
    for draft in ({}, {"draft_len": 4}, {"draft_len": 3, "draft_model": (spec, weights)}):
        engine = Engine(spec, weights, device="cuda", dtype=torch.bfloat16, max_tokens=4096, max_batch=4, deterministic=True, **draft)
        requests = [engine.submit(p, SamplingParams(max_tokens=100, ignore_eos=True)) for p in prompts]
        engine.step()
        pages = [r.pages for r in requests]
        engine.run()
        assert (engine.drafted > 0) == bool(draft)
        keys = [c.k[p].flatten(0, 1)[: r.length - 1] for c in engine.kv.caches.values() for r, p in zip(requests, pages, strict=True)]
        got.append(([r.token_ids for r in requests], keys))
    for tokens, keys in got[1:]:
        assert tokens == got[0][0]
        assert all(torch.equal(a, b) for a, b in zip(keys, got[0][1], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 1024), (1024, 2816), (5632, 1024), (128, 4096), (28672, 4096)])
def test_products_on_a_gpu_have_one_order_for_any_number_of_rows(n, k) -> None:
    from pyllm import ops
    from pyllm.ops import invariant

    g = torch.Generator("cuda").manual_seed(n)
    x, w = (torch.randn(rows, k, device="cuda", generator=g).bfloat16() for rows in (2100, n))
    (x8, xs), (w8, ws) = ops.quantize_fp8(x, "token"), ops.quantize_fp8(w, "token")
    wide, wide8 = invariant.invariant_linear(x, w), invariant.invariant_linear_fp8(x8, w8, xs, ws, None, torch.bfloat16)
    # fp32 sums of k products of rounded values, rounded to bf16: 2^-9 of the result, 2^-24 k of the sum of magnitudes
    want = x[:64].double() @ w.double().T
    slack = 2**-8 * want.abs() + k * 2**-24 * (x[:64].double().abs() @ w.double().abs().T)
    assert ((wide[:64].double() - want).abs() <= slack).all()
    for first, rows in ((0, 1), (3, 2), (0, 16), (7, 17), (0, 64), (100, 65), (0, 128), (30, 256), (0, 257), (513, 300), (0, 1024)):
        part = slice(first, first + rows)
        assert torch.equal(invariant.invariant_linear(x[part], w), wide[part]), (first, rows)
        assert torch.equal(invariant.invariant_linear_fp8(x8[part], w8, xs[part], ws, None, torch.bfloat16), wide8[part]), (first, rows)
