"""Prompts in, text out: `generate` for whole completions, `stream` for pieces of text as they become certain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

from pyllm.runtime.model import LoadedModel, load_model
from pyllm.runtime.params import SamplingParams
from pyllm.runtime.request import Request, TokenLogprob

if TYPE_CHECKING:
    from pyllm.load.tokenizer import Tokenizer

Prompt = str | Sequence[int]

__all__ = ["Completion", "LoadedModel", "TextStream", "generate", "load_model", "stream"]


@dataclass(frozen=True)
class Completion:
    """What one prompt became. `token_ids` includes the token that ended it, `text` does not; see `Request` for the reasons."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@overload
def generate(  # type: ignore[overload-overlap]
    model: LoadedModel, prompts: str, params: SamplingParams | None = None, *, raw: bool = False
) -> Completion: ...
@overload
def generate(
    model: LoadedModel, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *, raw: bool = False
) -> list[Completion]: ...
def generate(model, prompts, params=None, *, raw=False):
    """Complete one prompt (a string) or many (a list of strings or of lists of token ids), all together in one engine.

    params: one for all, or one per prompt. raw: no chat template. A prompt that fails while running comes back with finish_reason "error";
    one that can never run is a ValueError, and none is run.
    """
    if not isinstance(prompts, Sequence):
        raise ValueError(f"generate: prompts is {prompts!r}, expected a string, or a list of strings or of lists of token ids")
    many = [prompts] if isinstance(prompts, str) else list(prompts)
    if any(isinstance(p, int) for p in many):
        raise ValueError("generate: prompts is a list of numbers, expected a string, or a list of strings or of lists of token ids")
    each = list(params) if isinstance(params, Sequence) else [params] * len(many)
    if len(each) != len(many):
        raise ValueError(f"generate: {len(each)} params for {len(many)} prompts")
    requests: list[Request] = []
    try:
        for prompt, p in zip(many, each, strict=True):
            requests.append(model.engine.submit(model.encode(prompt, raw=raw), p))
        while not all(r.finished for r in requests):
            model.engine.step()
    finally:
        for request in requests:
            model.engine.abort(request)
    done = [_completion(model.tokenizer, r) for r in requests]
    return done[0] if isinstance(prompts, str) else done


def _completion(tokenizer: Tokenizer, r: Request) -> Completion:
    assert r.finish_reason is not None
    logprobs = None if r.logprobs is None else tuple(r.logprobs)
    text = tokenizer.decode(r.text_token_ids)
    return Completion(text, tuple(r.token_ids), tuple(r.prompt_token_ids), r.finish_reason, r.stop_reason, logprobs, r.error)


class TextStream:
    """Iterates over pieces of text, none of them empty and none ending inside a character; together they are the completion's text.

    `request` has the token ids, the reason it ended and the timing. Leaving the loop early, or `close()`, aborts the request.
    A request that fails while running raises RuntimeError.
    """

    def __init__(self, model: LoadedModel, request: Request) -> None:
        self.request = request
        self._model = model
        self._pieces = self._run()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        self._pieces.close()
        self._model.engine.abort(self.request)

    def _run(self):
        decoder, sent, request = self._model.tokenizer.stream(), 0, self.request
        try:
            while not request.finished:
                self._model.engine.step()
                ids = request.text_token_ids
                piece = "".join(decoder.push(i) for i in ids[sent:])
                sent = len(ids)
                if piece:
                    yield piece
            if request.error is not None:
                raise RuntimeError(request.error)
            if rest := decoder.flush():
                yield rest
        finally:
            self._model.engine.abort(request)


def stream(model: LoadedModel, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False) -> TextStream:
    """Start one completion and give its text piece by piece. Bad arguments raise here, before the first piece."""
    return TextStream(model, model.engine.submit(model.encode(prompt, raw=raw), params))
