"""Beam search: each step of a search asks for one token behind each beam, as requests whose prompts are read from the cache of prefixes.

So a step computes what the last page of each beam holds, at most `tokens_per_block` tokens, and the engine knows nothing of beams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from pyllm.api.outputs import CompletionOutput, RequestOutput
from pyllm.api.params import SamplingParams
from pyllm.api.retention import KvCacheRetentionConfig
from pyllm.runtime.request import Request, TokenLogprob


@dataclass(frozen=True)
class Beam:
    tokens: tuple[TokenLogprob, ...] = ()
    ended: bool = False

    @property
    def ids(self) -> list[int]:
        return [t.token_id for t in self.tokens]

    def score(self, penalty: float) -> float:
        return sum(t.logprob for t in self.tokens) / max(len(self.tokens), 1) ** penalty


Search = Generator[list[list[int]], Sequence[TokenLogprob], list[Beam]]


def search(prompt: list[int], params: SamplingParams, limit: int, ends: frozenset[int]) -> Search:
    """Yields what is to be continued, is sent a token's log-probability and alternatives for each, and returns the best beams.

    limit: tokens to generate. A beam that ends is set aside; the search is over when as many have as it is wide, and none that goes on can
    be better (early_stopping: at once). That is transformers' search with early_stopping="never" (True).
    """
    width, penalty = params.samples, params.length_penalty
    running, done = [Beam()], list[Beam]()
    for length in range(1, limit + 1):
        entries = yield [[*prompt, *b.ids] for b in running]
        tops = [(b, e.top, *one) for b, e in zip(running, entries, strict=True) for one in enumerate(e.top, 1)]
        told = params.logprobs or 0
        grown = [Beam((*b.tokens, TokenLogprob(t, p, rank, top[:told])), t in ends) for b, top, rank, (t, p) in tops]
        grown = sorted(grown, key=lambda b: -b.score(0.0))[: 2 * width]
        done += [b for b in grown[:width] if b.ended]
        done = sorted(done, key=lambda b: -b.score(penalty))[:width]
        running = [b for b in grown if not b.ended][:width]
        full = len(done) == width
        if not running or (full and (params.early_stopping or done[-1].score(penalty) >= _best(running[0], length, limit, penalty))):
            return done[: params.n]
    return sorted([*done, *running], key=lambda b: -b.score(penalty))[: params.n]


def _best(beam: Beam, length: int, limit: int, penalty: float) -> float:
    """No continuation of the beam scores more: its sum only falls, and what it is divided by grows with a positive penalty alone."""
    return beam.score(0.0) / (limit if penalty > 0 else length) ** penalty


def step_params(params: SamplingParams) -> SamplingParams:
    """Of the requests of one step."""
    return SamplingParams(max_tokens=1, ignore_eos=True, logprobs=2 * params.samples, detokenize=False)


Generate = Callable[[list[list[int]], list[SamplingParams], list[KvCacheRetentionConfig | None]], Sequence[RequestOutput]]


def run_searches(generate: Generate, groups: Sequence[Sequence[Request]]) -> None:
    """Search for all prompts together, a step of each at a time. groups: the requests of one prompt, as many as beams are wanted; they get
    the beams."""
    active: dict[int, tuple[Search, list[list[int]]]] = {}
    for i, (first, *_) in enumerate(groups):
        found = search(first.prompt_token_ids, first.params, first.limit, first.ends)
        active[i] = found, next(found)
    while active:
        asked = [(i, ids) for i, (_, wanted) in active.items() for ids in wanted]
        each = [groups[i][0] for i, _ in asked]
        outs = generate([ids for _, ids in asked], [step_params(r.params) for r in each], [r.retention for r in each])
        answers: dict[int, list[CompletionOutput]] = {i: [] for i in active}
        for (i, _), out in zip(asked, outs, strict=True):
            answers[i].append(out.outputs[0])
        for i, given in answers.items():
            failed = next((c for c in given if not c.logprobs), None)
            if failed is not None:
                del active[i]
                for request in groups[i]:
                    request.error, request.finish_reason = failed.error, failed.finish_reason
                continue
            try:
                active[i] = active[i][0], active[i][0].send([c.logprobs[0] for c in given if c.logprobs])
            except StopIteration as end:
                del active[i]
                for request, beam in zip(groups[i], end.value, strict=True):
                    _fill(request, beam)


def _fill(request: Request, beam: Beam) -> None:
    """The beam as an ended request, which is how results are told."""
    request.token_ids, request.logprobs = beam.ids, list(beam.tokens)
    request.timing.tokens = [time.perf_counter()] * len(beam.tokens)
    request.finish_reason, request.stop_reason = ("stop", beam.ids[-1]) if beam.ended else ("length", None)
