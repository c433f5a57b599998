"""What `LLM.generate` and `generate_async` give: `RequestOutput` with one `CompletionOutput` per sample, named as in TensorRT-LLM."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyllm.api.refuse import MAX_SECONDS, shown
from pyllm.api.text import TextOutput
from pyllm.runtime.request import Request, Timing, TokenLogprob
from pyllm.runtime.wake import wake

if TYPE_CHECKING:
    from pyllm.load.tokenizer import Tokenizer


@dataclass
class CompletionOutput:
    """One sample. `token_ids` includes the token that ended it, `text` does not. finish_reason: None while it runs, then "stop"
    (`stop_reason`: token id or stop string), "length", "abort" or "error" (`error` says what). `*_diff`: what came since the last look.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    text_diff: str = field(default="", repr=False)
    token_ids_diff: list[int] = field(default_factory=list, repr=False)
    logprobs_diff: list[TokenLogprob] | None = field(default=None, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)


class RequestOutput:
    """One prompt and its samples. As a result it is complete; from `generate_async` it is a handle: `result()`, `await aresult()`,
    iteration (`for` or `async for`) over its own growing state, `abort()`. Leaving an iteration early aborts the request.
    """

    def __init__(
        self, prompt: str | None, requests: Sequence[Request], tokenizer: Tokenizer | None, keep: int, abort: Callable[[Request], None]
    ) -> None:
        self.prompt, self.prompt_token_ids = prompt, list(requests[0].prompt_token_ids)  # the engine goes by its own
        self.outputs = [CompletionOutput(r.index) for r in requests]
        self._requests, self._keep, self._abort = list(requests), keep, abort
        self._changed = threading.Condition()
        self._version = 0
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._texts = [r.text or (_text(tokenizer, r) if tokenizer is not None and r.params.detokenize else None) for r in requests]
        for r in requests:
            r.listener = self._on_change

    def __repr__(self) -> str:
        return f"RequestOutput(request_id={self.request_id}, prompt={self.prompt!r}, outputs={self.outputs!r}, finished={self.finished})"

    @property
    def request_id(self) -> int:
        return self._requests[0].request_id

    @property
    def finished(self) -> bool:
        return all(r.finished for r in self._requests)

    @property
    def timing(self) -> Timing:
        """Of the first sample."""
        return self._requests[0].timing

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were read from the prefix cache."""
        return self._requests[0].cached_tokens

    def abort(self) -> None:
        for r in self._requests:
            if not r.finished:
                self._abort(r)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait until all samples have ended. TimeoutError after `timeout` seconds; the request goes on."""
        number = isinstance(timeout, (int, float)) and timeout == timeout
        if timeout is not None and not number:
            raise ValueError(f"RequestOutput.result: timeout is {shown(timeout)}, expected None or seconds")
        timeout = None if timeout is None or timeout > MAX_SECONDS else timeout
        with self._changed:
            if not self._changed.wait_for(lambda: self.finished, timeout):
                raise TimeoutError(f"RequestOutput.result: request {self.request_id} still runs after {timeout} seconds")
        return self._look()

    async def aresult(self) -> RequestOutput:
        while not self.finished:
            await self._wait(self._version)
        return self._look()

    def __iter__(self) -> Iterator[RequestOutput]:
        seen, done = 0, False
        try:
            while not done:
                with self._changed:
                    while self._version == seen and not self.finished:
                        self._changed.wait()
                    seen, done = self._version, self.finished
                yield self._look()
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        seen, done = 0, False
        try:
            while not done:
                if self._version == seen and not self.finished:
                    await self._wait(seen)
                seen, done = self._version, self.finished
                yield self._look()
        finally:
            self.abort()

    async def _wait(self, seen: int) -> None:
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._changed:
            if self._version != seen or self.finished:
                return
            self._waiters.append(waiter)
        await waiter[1].wait()

    def _on_change(self, request: Request) -> None:
        """Called in the engine's thread."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()
            waiters, self._waiters = self._waiters, []
        if waiters:
            wake(waiters)

    def _look(self) -> RequestOutput:
        with self._changed:  # several threads may wait for one request
            return self._look_now()

    def _look_now(self) -> RequestOutput:
        for out, request, text in zip(self.outputs, self._requests, self._texts, strict=True):
            _update(out, request, text)
        if self.finished and len(self._requests) > self._keep:  # best_of
            best = sorted(self.outputs, key=lambda out: -(out.cumulative_logprob or 0.0))[: self._keep]
            kept = [i for i, out in enumerate(self.outputs) if any(out is b for b in best)]
            self.outputs = [self.outputs[i] for i in kept]
            self._requests, self._texts = [self._requests[i] for i in kept], [self._texts[i] for i in kept]
            for i, out in enumerate(self.outputs):
                out.index = i
        return self


def _text(tokenizer: Tokenizer, request: Request) -> TextOutput:
    return TextOutput(tokenizer, skip_special_tokens=request.params.skip_special_tokens)


def _update(out: CompletionOutput, request: Request, text: TextOutput | None) -> None:
    """The engine only appends while it runs, and says last that a request has ended: what is read here belongs together."""
    reason, before, sent = request.finish_reason, len(out.token_ids), len(out.text)
    n = len(request.token_ids)
    ended = reason is not None and out.finish_reason is None
    out.token_ids_diff = request.token_ids[before:n]
    out.token_ids += out.token_ids_diff
    if request.logprobs is not None:
        out.logprobs = request.logprobs[:n]
        out.logprobs_diff = out.logprobs[before:]
        out.cumulative_logprob = sum(p.logprob for p in out.logprobs)
    out.prompt_logprobs = request.prompt_logprobs
    if text is not None:
        if request.text is None:
            text.push(request.text_token_ids[:n])
        if ended and not isinstance(request.stop_reason, str):
            text.finish()
        out.text = text.text if reason is not None else text.text[: max(text.certain(), sent)]
        out.text_diff = out.text[sent:]
    if ended:
        out.finish_reason, out.stop_reason, out.error = reason, request.stop_reason, request.error
