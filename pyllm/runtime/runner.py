"""Launches steps on the device and returns without waiting for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyllm.api.checks import check_captured, check_logits
from pyllm.ops.attention import INT8_ROWS
from pyllm.ops.sampling import sample_tokens
from pyllm.runtime.batch import Batch
from pyllm.runtime.draft import DraftModel
from pyllm.runtime.graph import Graphs, mixed_shapes, wasteful
from pyllm.runtime.kv import KvPool
from pyllm.runtime.request import Request
from pyllm.runtime.rows import Rows
from pyllm.runtime.sample import Logprobs, Traits, to_device, to_host
from pyllm.runtime.schedule import Chunk, Plan
from pyllm.runtime.shape import Shaper
from pyllm.runtime.step import PackedStep, StepBuffers, padded_rows


@dataclass
class Flight:
    """A launched step: what the host reads of it later. requests: who sampled tokens[i]; None: an idle row."""

    requests: list[Request | None]
    tokens: Tensor | None
    logprobs: tuple[list[Request], Logprobs] | None = None
    prompt_logprobs: list[tuple[Request, int, Logprobs]] = field(default_factory=list)
    drafts: list[Chunk] = field(default_factory=list)  # then tokens has one for each of their tokens
    done: torch.cuda.Event | None = None

    def wait(self) -> np.ndarray:
        if self.done is not None:
            self.done.synchronize()
        return np.empty(0, np.int32) if self.tokens is None else self.tokens.numpy()


class Runner:
    """module(batch) -> logits `[R, V]`. Steps have at most max_batch requests of max_length tokens, and max_tokens tokens in all. They are
    padded to the next of decode_sizes (rows) or mixed_sizes (tokens), if there is one; a mixed step also in its sequences (`mixed_shapes`).
    guess_rows: if not 0, guesses are verified as so many sequences of one row, as if they were decode steps.
    """

    def __init__(
        self, module: Callable[[Batch], Tensor], kv: KvPool, *, vocab: int, max_batch: int, max_length: int, max_tokens: int,
        decode_sizes: Sequence[int], mixed_sizes: Sequence[int], draft: DraftModel | None = None, guess_rows: int = 0,
    ) -> None:  # fmt: skip
        max_pages = min(-(-max_length // kv.page_size), kv.pages - 1)  # no request can hold more than the pool has
        room: dict[str, Any] = {"max_batch": max_batch, "max_pages": max_pages, "page_size": kv.page_size, "device": kv.device}
        self._module, self._kv, self.rows = draft.beside(module) if draft else module, kv, Rows(**room)
        self._draft, self._guess_seconds, self._vocab = draft, 0.0, vocab
        apart = INT8_ROWS if kv.dtype == torch.int8 else None
        self._buffers = StepBuffers(max_tokens=max_tokens, pages=kv.pages, vocab=vocab, most_rows=apart, guess_rows=guess_rows, **room)
        self._shaper = Shaper(max_batch=max_batch, vocab=vocab, device=kv.device)
        self.decode_sizes = check_captured("graph_sizes", sorted(decode_sizes), max_batch)
        mixed_sizes = check_captured("mixed_sizes", mixed_sizes, max_tokens)
        if apart and mixed_sizes:  # the sequences of a captured step may have any length
            raise ValueError("Engine: mixed_sizes (capture_num_tokens) with an int8 cache, expected none: such steps run without graphs")
        self.mixed_sizes = mixed_shapes(mixed_sizes, max_batch)
        kinds: dict[str, Callable[[Any], Tensor]] = {"guess": self._guess}
        kinds |= {"tokens": self._tokens, "logits": self._logits, "mixed": self._padded}
        self.graphs = Graphs(kinds, kv.device)
        self._traits, self._version = Traits(), -1

    def capture(self, progress: bool) -> None:
        mixed = [("mixed", size) for size in reversed(self.mixed_sizes)]
        decode = [(kind, n) for n in reversed(self.decode_sizes) for kind in ("logits", "tokens")]
        if self._draft:
            decode += [("guess", n) for n in reversed(self.decode_sizes)]
        if self._kv.device.type == "cuda" and (mixed or decode):
            self.graphs.capture([*mixed, *decode], progress)

    @property
    def traits(self) -> Traits:
        """Of all requests that hold a row."""
        if self._version != self.rows.version:
            self._traits = Traits.of([r for r in self.rows.held() if r is not None])
            self._version = self.rows.version
        return self._traits

    def launch(self, plan: Plan) -> Flight:
        with torch.inference_mode():
            self._shaper.move(self.rows.flush())
            flight = self._verify(plan) if plan.drafts else self._mixed(plan) if plan.chunks else self._decode()
            if self._kv.device.type == "cuda":
                flight.done = torch.cuda.Event()
                flight.done.record(torch.cuda.current_stream(self._kv.device))
            return flight

    def guess(self, requests: Sequence[Request]) -> list[np.ndarray]:
        """The draft model's guesses for each of these requests, which hold a row; waits for them."""
        start = time.perf_counter()
        with torch.inference_mode():
            self._shaper.move(self.rows.flush())
            n = next((s for s in self.decode_sizes if s >= self.rows.top), self.rows.top)
            guesses = self.graphs.run("guess", n).cpu().numpy().reshape(-1, n)
        self._guess_seconds += time.perf_counter() - start
        return [guesses[:, r.row] for r in requests]

    def take_guess_seconds(self) -> float:
        """Spent in `guess` since the last call."""
        seconds, self._guess_seconds = self._guess_seconds, 0.0
        return seconds

    def _guess(self, n: int) -> Tensor:
        assert self._draft is not None
        return self._draft.guess(self.rows.batch(n, self._kv.caches))

    def _logits(self, n: int) -> Tensor:
        return check_logits(self._module(self.rows.batch(n, self._kv.caches)), n, self._vocab)

    def _tokens(self, n: int) -> Tensor:
        """A whole greedy step: this is what a graph replays."""
        tokens = sample_tokens(self._logits(n))
        self.rows.advance(n, tokens)
        return tokens

    def _decode(self) -> Flight:
        top, traits = self.rows.top, self.traits
        n = next((s for s in self.decode_sizes if s >= top), top)
        requests = self.rows.held()
        if traits.plain:
            return Flight(requests, to_host(self.graphs.run("tokens", n)[:top]))
        logits = self.graphs.run("logits", n)
        padded = [*requests, *[None] * (n - top)]
        tokens = self._shaper.sample(logits, padded, traits, self.rows.sampling(n))
        self.rows.advance(n, tokens)
        if traits.shaped:
            self._shaper.count(torch.arange(top, device=tokens.device), tokens[:top])
        return Flight(requests, to_host(tokens[:top]), self._logprobs(logits, tokens, requests))

    def _padded(self, size: tuple[int, int]) -> Tensor:
        return check_logits(self._module(self._buffers.padded_batch(size, self.rows, self._kv.caches)), padded_rows(size), self._vocab)

    def _packed(self, step: PackedStep) -> Tensor:
        """Logits of a step that the host has packed: through a graph that is large enough, if there is one."""
        need = (step.tokens, step.sequences)
        sizes = self.mixed_sizes if step.max_q > 1 else []  # a captured step takes another attention kernel
        size = next((s for s in sizes if s[0] >= need[0] and s[1] >= need[1] and padded_rows(s) >= step.logit_rows), None)
        if size is None or wasteful(step.tokens, size[0]):
            return check_logits(self._module(self._buffers.batch(step, self.rows, self._kv.caches)), step.logit_rows, self._vocab)
        self._buffers.pad(step, size)
        return self.graphs.run("mixed", size)[: step.logit_rows]

    def _verify(self, plan: Plan) -> Flight:
        """What the model chooses after each guess; the host decides, and tells the rows with the next step."""
        return Flight([], to_host(sample_tokens(self._packed(self._buffers.pack(plan)))), drafts=plan.drafts)

    def _mixed(self, plan: Plan) -> Flight:
        """Prompt tokens beside decodes: packed by the host."""
        step, traits = self._buffers.pack(plan), self.traits
        logits = self._packed(step)
        prompt_logprobs = [_prompt_logprobs(logits, *where) for where in step.prompt_rows]
        if not step.requests:
            return Flight([], None, prompt_logprobs=prompt_logprobs)
        if len(step.requests) < step.logit_rows:
            logits = logits[to_device(step.sample_at, logits.device)]
        for chunk in plan.chunks:
            if chunk.last:
                self._shaper.admit(chunk.request)
        rows = self._buffers.sampled_rows(step)
        arguments = {} if traits.greedy else self.rows.sampling(rows)
        tokens = self._shaper.sample(logits, step.requests, traits, arguments)
        self.rows.advance_some(rows, tokens)
        if traits.shaped:
            self._shaper.count(rows, tokens)
        return Flight([*step.requests], to_host(tokens), self._logprobs(logits, tokens, step.requests), prompt_logprobs)

    def _logprobs(self, logits: Tensor, tokens: Tensor, requests: Sequence[Request | None]) -> tuple[list[Request], Logprobs] | None:
        asked = [(i, r, r.params.logprobs) for i, r in enumerate(requests) if r is not None and r.params.logprobs is not None]
        if not asked:
            return None
        rows, owners, tops = zip(*asked, strict=True)
        return list(owners), Logprobs.start(logits, tokens, rows, tops)


def _prompt_logprobs(logits: Tensor, request: Request, start: int, first: int, count: int) -> tuple[Request, int, Logprobs]:
    """Logits at positions start .. start + count predict the tokens one further on; only the prompt's are reported."""
    count = min(count, len(request.prompt_token_ids) - 1 - start)
    targets = to_device(request.tokens[start + 1 : start + 1 + count].copy(), logits.device, torch.int32)
    top = request.params.prompt_logprobs or 0
    return request, start + 1, Logprobs.start(logits[first : first + count], targets, range(count), [top] * count)
