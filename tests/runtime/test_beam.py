"""Beam search: transformers' beams on a real model, the best of all sequences where the width covers them, ends and lengths by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pyllm import LLM, KvCacheConfig, SamplingParams
from pyllm.api.beam import Beam, search
from pyllm.runtime.request import TokenLogprob
from tests.runtime.tiny import EOS, VOCAB, save_tiny, tiny_spec, tiny_weights

CACHE = KvCacheConfig(max_tokens=1024, tokens_per_block=16)


def prompt_of(n: int) -> list[int]:
    return torch.randint(0, VOCAB - 8, (n,), generator=torch.Generator().manual_seed(n)).tolist()


def run(table, prompt, params, limit, ends=frozenset()):
    """`search` over a model that is a function (history) -> {token: probability}."""
    going = search(prompt, params, limit, ends)
    wanted = next(going)
    try:
        while True:
            given = []
            for ids in wanted:
                top = sorted(((t, math.log(p)) for t, p in table(ids).items()), key=lambda e: -e[1])[: 2 * params.samples]
                given.append(TokenLogprob(top[0][0], top[0][1], 1, tuple(top)))
            wanted = going.send(given)
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("seed", range(4))
def test_a_width_that_covers_all_prefixes_finds_the_best_sequences(seed) -> None:
    g = torch.Generator().manual_seed(seed)
    first, second = torch.rand(5, generator=g).softmax(0), torch.rand(5, 5, generator=g).softmax(1)

    def table(ids):
        return dict(enumerate((first if len(ids) == 1 else second[ids[-1]]).tolist()))

    beams = run(table, [9], SamplingParams(use_beam_search=True, n=5, max_tokens=2), 2)
    every = {(a, b): math.log(first[a]) + math.log(second[a, b]) for a, b in itertools.product(range(5), repeat=2)}
    best = sorted(every, key=lambda s: -every[s])[:5]
    assert [tuple(b.ids) for b in beams] == best
    for beam, ids in zip(beams, best, strict=True):
        assert abs(beam.score(0.0) - every[ids]) < 1e-9
        assert abs(beam.score(1.0) - every[ids] / 2) < 1e-9


def test_ends_lengths_and_when_a_search_is_over() -> None:
    """Token 0 ends. A short end of probability 0.3, or a sure way on."""
    seen = []

    def evenly(ids):
        seen.append(len(ids))
        return {0: 0.45, 1: 0.55}

    def table(ids):
        return {0: 0.3, 1: 0.6, 2: 0.1} if len(ids) == 1 else {0: 0.01, 1: 0.98, 2: 0.01}

    def ask(model=table, **options):
        seen.clear()
        params = SamplingParams(use_beam_search=True, n=2, max_tokens=6, **options)
        return run(model, [5], params, 6, frozenset({0}))

    short, long = [0], [1] * 6
    assert [b.ids for b in ask(length_penalty=0.0)] == [long, short]  # 0.6 * 0.98^5 = 0.54 against 0.3
    assert ask(length_penalty=-1.0)[0].ids == short
    assert ask(length_penalty=2.0)[0].ids == long
    assert [b.ids for b in ask(evenly, early_stopping=True)] == [[1, 0], [0]]  # two have ended: that is all
    assert seen == [1, 2]
    ask(evenly)
    assert max(seen) == 6  # what goes on could still be better: log 0.55 a token against log 0.45
    ask(evenly, length_penalty=0.0)
    assert seen == [1, 2, 3]  # 0.55^3 is less than what has ended: 0.45 and 0.55 * 0.45
    assert all(b.ended == (b.ids[-1] == 0) for b in ask())


def test_a_score_is_that_of_its_tokens() -> None:
    beam = Beam((TokenLogprob(1, -1.0, 1), TokenLogprob(2, -3.0, 2)))
    assert (beam.ids, beam.score(0.0), beam.score(1.0), beam.score(2.0)) == ([1, 2], -4.0, -2.0, -1.0)


@pytest.fixture(scope="module")
def llm():
    with LLM(tiny_spec(), weights=tiny_weights(0), device="cpu", max_batch_size=4, kv_cache_config=CACHE, progress=False) as made:
        yield made


def test_the_beams_are_those_of_transformers(llm, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "m"), dtype=torch.float32).eval()
    for n, penalty in ((5, 1.0), (33, 0.0), (60, 1.5)):
        prompt = prompt_of(n)
        with torch.no_grad():
            want = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, n, dtype=torch.long), num_beams=4, num_return_sequences=3,
                max_new_tokens=12, do_sample=False, length_penalty=penalty, early_stopping="never", eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        params = SamplingParams(use_beam_search=True, n=3, best_of=4, max_tokens=12, length_penalty=penalty, ignore_eos=True)
        out = llm.generate(prompt, params, use_tqdm=False)
        assert [c.token_ids for c in out.outputs] == want[:, n:].tolist()
        assert [c.index for c in out.outputs] == [0, 1, 2]
        assert all(c.finish_reason == "length" for c in out.outputs)


def test_many_prompts_and_plain_requests_in_one_call(llm) -> None:
    beams, plain = SamplingParams(use_beam_search=True, n=2, max_tokens=6), SamplingParams(max_tokens=6)
    prompts = [prompt_of(n) for n in (3, 20, 40)]
    outs = llm.generate(prompts, [beams, plain, beams], use_tqdm=False)
    for prompt, params, out in zip(prompts, (beams, plain, beams), outs, strict=True):
        alone = llm.generate(prompt, params, use_tqdm=False)
        assert [c.token_ids for c in out.outputs] == [c.token_ids for c in alone.outputs]
        assert len(out.outputs) == params.n
        assert out.finished
    scores = [c.cumulative_logprob / c.length for c in outs[0].outputs]
    assert scores == sorted(scores, reverse=True)
    assert llm.get_stats()["used_pages"] == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n": 1}, "n or best_of is 1, expected 2 to 10 beams"),
        ({"n": 11}, "n or best_of is 11, expected 2 to 10 beams"),
        (
            {"temperature": 0.5},
            "use_beam_search with temperature=0.5; it takes the likeliest beams; leave that out, or sample",
        ),
        ({"top_k": 5}, "use_beam_search with top_k=5; it takes the likeliest beams; leave that out, or sample: n and best_of without"),
        ({"top_p": 0.9}, "use_beam_search with top_p=0.9; it takes the likeliest beams"),
        ({"min_p": 0.1}, "use_beam_search with min_p=0.1; it takes the likeliest beams"),
        ({"stop": "x"}, "use_beam_search with stop=.*; use stop_token_ids"),
        (
            {"repetition_penalty": 1.2},
            "use_beam_search with repetition_penalty=1.2; it takes the model's logits as they are",
        ),
        ({"bad": "x"}, "use_beam_search with bad=.*; it takes the model's logits as they are"),
        ({"min_tokens": 1}, "use_beam_search with min_tokens=1; it takes the model's logits"),
        ({"prompt_logprobs": 0}, "use_beam_search with prompt_logprobs=0; ask for them with a request of its own"),
        ({"length_penalty": 1e308}, "length_penalty is 1e\\+308, expected 0, or 1.2e-38 to 3.4e\\+38 in magnitude"),
        ({"length_penalty": -11}, "length_penalty is -11, expected a number from -10 to 10"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty or early_stopping is given without use_beam_search"),
    ],
)
def test_what_does_not_go_with_it(llm, options, text) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams: {text}"):
        SamplingParams(**({"use_beam_search": True, "n": 3} | options))
    with pytest.raises(ValueError, match="LLM.generate_async: a beam search is known at its end alone"):
        llm.generate_async([1, 2], SamplingParams(use_beam_search=True, n=2))


def test_cuts_that_cut_nothing_go_with_it(llm) -> None:
    plain, off = (SamplingParams(use_beam_search=True, n=2, max_tokens=3, **o) for o in ({}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}))
    first, second = llm.generate([prompt_of(4)] * 2, [plain, off], use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_the_alternatives_that_are_asked_for(llm) -> None:
    """Of each token of a beam: the likeliest ones at its place, as of any request, however many the search looks at."""
    params = SamplingParams(use_beam_search=True, n=2, best_of=3, max_tokens=4, logprobs=2, ignore_eos=True)
    for c in llm.generate(prompt_of(5), params, use_tqdm=False).outputs:
        for at, entry in enumerate(c.logprobs):
            plain = SamplingParams(max_tokens=1, logprobs=2, ignore_eos=True)
            alone = llm.generate([*prompt_of(5), *c.token_ids[:at]], plain, use_tqdm=False).outputs[0].logprobs[0]
            assert [t for t, _ in entry.top] == [t for t, _ in alone.top]
            assert [p for _, p in entry.top] == pytest.approx([p for _, p in alone.top], abs=1e-4)


def test_an_end_token_ends_a_beam(llm) -> None:
    params = SamplingParams(use_beam_search=True, n=4, max_tokens=20, stop_token_ids=tuple(range(0, VOCAB, 3)))
    out = llm.generate(prompt_of(7), params, use_tqdm=False)
    for c in out.outputs:
        ends = [i for i, t in enumerate(c.token_ids) if t % 3 == 0 or t == EOS]
        assert ends == ([c.length - 1] if c.finish_reason == "stop" else [])
        assert c.stop_reason == (c.token_ids[-1] if c.finish_reason == "stop" else None)
    assert any(c.finish_reason == "stop" for c in out.outputs)
