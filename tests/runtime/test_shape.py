"""Penalties, biases, bad words, min_tokens and processors: against the plain rules, per row, and the same in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pyllm.api.params import SamplingParams
from pyllm.runtime.engine import Engine
from tests.runtime.fake import EOS, FakeModel, FakeSpec, expected, hashed
from tests.runtime.test_engine import assert_idle, make

VOCAB = 40
PROMPT = [5, 9, 9, 2]


def noise(history: list[int]) -> torch.Tensor:
    """Logits of a history: any other gives others."""
    return torch.from_numpy(np.random.default_rng(history).normal(size=VOCAB)).float()


class NoiseModel(FakeModel):
    """The checking fake, with dense logits."""

    def __init__(self) -> None:
        self.histories: list[list[int]] = []
        super().__init__(choose=self._note, vocab=VOCAB, nan_token=-1)

    def _note(self, history: list[int]) -> int:
        self.histories.append(list(history))
        return 0

    def __call__(self, b) -> torch.Tensor:
        self.histories = []
        idle = super().__call__(b).sum(1) == 0
        rows = iter(self.histories)
        return torch.stack([torch.zeros(VOCAB) if i else noise(next(rows)) for i in idle.tolist()] or [torch.zeros(VOCAB)])[: len(idle)]


def plain(prompt: list[int], p: SamplingParams, eos: tuple[int, ...] = (EOS,)) -> list[int]:
    """The rules, one token after the other, in fp32 as the engine has it."""
    history, out = list(prompt), []
    while len(out) < p.max_tokens:
        x = noise(history).clone()
        for t in set(history):
            x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
        for t in set(out):
            x[t] = x[t] - p.presence_penalty - p.frequency_penalty * out.count(t)
        for t, v in p.logit_bias:
            x[t] += v
        for t in (*p.bad_token_ids, *((*p.stop_token_ids, *eos) if len(out) < p.min_tokens else ())):
            x[t] = -torch.inf
        out.append(int(x.argmax()))
        history.append(out[-1])
        if out[-1] in (*p.stop_token_ids, *eos):
            break
    return out


CASES = [
    SamplingParams(max_tokens=25, repetition_penalty=1.7),
    SamplingParams(max_tokens=25, presence_penalty=1.5),
    SamplingParams(max_tokens=25, frequency_penalty=0.8),
    SamplingParams(max_tokens=25, repetition_penalty=0.6, presence_penalty=-0.5, frequency_penalty=0.1),
    SamplingParams(max_tokens=25, logit_bias={3: 2.0, 4: -torch.inf, 3 + 1: 1.0}),
    SamplingParams(max_tokens=25, bad_token_ids=(1, 2, 3, 4, 5, 6)),
    SamplingParams(max_tokens=25, min_tokens=20, stop_token_ids=tuple(range(20))),
    SamplingParams(max_tokens=25),
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", [{}, {"graph_sizes": [4]}, {"reserve": False, "pages": 6}])
def test_each_row_gets_its_own_rules_in_one_batch(overlap, options) -> None:
    """Also with padded rows, and when requests are preempted and their counts start anew from their tokens."""
    engine = make(NoiseModel(), FakeSpec(vocab_size=VOCAB), overlap=overlap, eos_ids=(EOS,), **options)
    requests = [engine.submit([*PROMPT, i], p) for i, p in enumerate(CASES)]
    engine.run()
    for i, (r, p) in enumerate(zip(requests, CASES, strict=True)):
        assert r.token_ids == plain([*PROMPT, i], p), p
    assert bool(engine.preemptions) == ("reserve" in options)
    assert_idle(engine)


def test_penalties_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    engine = make(NoiseModel(), FakeSpec(vocab_size=VOCAB))
    r = engine.submit(PROMPT, SamplingParams(max_tokens=15, repetition_penalty=1.4))
    engine.run()
    rule, history = transformers.RepetitionPenaltyLogitsProcessor(1.4), list(PROMPT)
    for token in r.token_ids:
        assert token == int(rule(torch.tensor([history]), noise(history)[None]).argmax())
        history.append(token)


def test_presence_and_frequency_do_not_count_the_prompt() -> None:
    for options in ({"presence_penalty": 100.0}, {"frequency_penalty": 100.0}):
        engine = make()
        r = engine.submit([hashed([7, 7])] * 3, SamplingParams(max_tokens=1, **options))
        engine.run()
        assert r.token_ids == expected(r.prompt_token_ids, 1, 120)


def test_bad_words_of_several_tokens() -> None:
    """The last token is taken away only where the ones before it have come."""
    free = expected([1, 2], 6, 120)
    engine = make(overlap=True)
    params = SamplingParams(max_tokens=6)
    object.__setattr__(params, "bad_words", ((free[1], free[2]), (2, free[0] + 1), (99, free[3])))
    other = engine.submit([3, 4], SamplingParams(max_tokens=6))
    r = engine.submit([1, 2], params)
    engine.run()
    assert r.token_ids[:2] == free[:2]
    assert r.token_ids[2] != free[2]
    assert other.token_ids == expected([3, 4], 6, 120)


def test_a_processor_sees_all_tokens_and_its_mistakes_are_named() -> None:
    seen = []

    def processor(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(list(ids))
        return logits.roll(1)

    engine = make(overlap=True)
    r = engine.submit([1, 2], SamplingParams(max_tokens=4, logits_processor=processor))
    other = engine.submit([3, 4], SamplingParams(max_tokens=6))
    engine.run()
    assert seen == [[1, 2, *r.token_ids[:n]] for n in range(4)]
    assert r.token_ids == [(hashed(ids) + 1) % 61 for ids in seen]
    assert other.token_ids == expected([3, 4], 6, 120)
    none = engine.submit([1], SamplingParams(max_tokens=2, logits_processor=lambda ids, logits: None))
    raises = engine.submit([1], SamplingParams(max_tokens=2, logits_processor=lambda ids, logits: 1 // 0))
    other = engine.submit([3, 4], SamplingParams(max_tokens=6))
    engine.run()
    assert [r.finish_reason for r in (none, raises, other)] == ["error", "error", "length"]
    assert "a logits_processor failed: ValueError: " in none.error
    assert none.error.endswith("returned None, expected logits of shape [61]")
    assert raises.error == "a logits_processor failed: ZeroDivisionError: integer division or modulo by zero"
    assert other.token_ids == expected([3, 4], 6, 120)
    assert_idle(engine)


def test_prompt_logprobs_are_those_of_each_position() -> None:
    def engine(**options) -> Engine:
        return make(NoiseModel(), FakeSpec(vocab_size=VOCAB), **options)

    prompt = np.random.default_rng(0).integers(0, VOCAB, 50).tolist()
    for options in ({"chunk": 7}, {"chunk": 200}, {"overlap": True, "chunk": 16}):
        e = engine(**options)
        params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1)
        beside = e.submit(prompt[:20], SamplingParams(max_tokens=5))
        for r in (e.submit(prompt, params), e.submit(prompt, params), e.submit([3], params)):
            e.run()
            assert r.prompt_logprobs[0] is None
            assert len(r.prompt_logprobs) == len(r.prompt_token_ids)
            for n, entry in enumerate(r.prompt_logprobs[1:], 1):
                want = noise(prompt[:n]).double().log_softmax(-1)
                assert entry.token_id == prompt[n]
                assert abs(entry.logprob - want[prompt[n]].item()) < 2**-17 + 2**-22 * 10
                assert [t for t, _ in entry.top] == want.topk(2).indices.tolist()
            assert len(r.logprobs) == 3
        assert len(beside.token_ids) == 5
        assert_idle(e)
