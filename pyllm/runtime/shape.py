"""Changes to logits before a token is chosen, for the rows whose requests ask: penalties, logit_bias, bad words, min_tokens, processors.

They apply in that order, to fp32 logits. With c the number of times a token was generated, and "seen" a token of prompt or output:
  repetition: seen logits are divided by it where positive, else multiplied (transformers' rule);
  presence and frequency: logit -= presence * (c > 0) + frequency * c (OpenAI's rule: the prompt does not count).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyllm.api.checks import told
from pyllm.runtime.request import Request
from pyllm.runtime.sample import Traits, to_device

_BANNED = float("-inf")
SPOILED = -2  # the token of a row that only the request's own changes have spoiled: what the cache holds is as good as before


class Shaper:
    """Counts of tokens, by row, once a request with penalties has come; else nothing is kept."""

    def __init__(self, *, max_batch: int, vocab: int, device: torch.device) -> None:
        self._size, self._device = (max_batch, vocab), device
        self._counts: Tensor | None = None  # [S, V] int32: of generated tokens
        self._prompt: Tensor | None = None  # [S, V] bool: tokens of the prompt

    def admit(self, request: Request) -> None:
        """Start the request's row; a request that was preempted brings its tokens along."""
        if not request.params.penalized:
            return
        if self._counts is None or self._prompt is None:
            self._counts = torch.zeros(self._size, dtype=torch.int32, device=self._device)
            self._prompt = torch.zeros(self._size, dtype=torch.bool, device=self._device)
        vocab = self._size[1]
        counts, prompt = (np.bincount(np.asarray(ids, np.int64), minlength=vocab) for ids in (request.token_ids, request.prompt_token_ids))
        self._counts[request.row] = to_device(counts, self._device, torch.int32)
        self._prompt[request.row] = to_device(prompt > 0, self._device, torch.bool)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        for t in (self._counts, self._prompt):
            if t is not None and moves:
                source, target = to_device(moves, self._device).unbind(1)
                t[target] = t[source]

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """These rows (int64) have sampled these tokens."""
        if self._counts is not None:
            at = rows * self._size[1] + tokens.clamp_min(0)
            self._counts.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))

    def sample(self, logits: Tensor, requests: Sequence[Request | None], traits: Traits, arguments: dict[str, Tensor]) -> Tensor:
        """Tokens, of row i as requests[i] asks: -1, or `SPOILED`, of a row without a number to choose."""
        if not traits.shaped:
            return traits.sample(logits, arguments)
        tokens = traits.sample(self.shape(logits, requests), arguments)
        return tokens.masked_fill_((tokens < 0) & logits.amax(1).isfinite(), SPOILED)

    def shape(self, logits: Tensor, requests: Sequence[Request | None]) -> Tensor:
        """fp32 logits, row i changed as requests[i] asks."""
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        active = [(i, r) for i, r in enumerate(requests) if r is not None and r.params.shaped]
        self._penalize(logits, [(i, r) for i, r in active if r.params.penalized])
        biased = [(i, t, v) for i, r in active for t, v in r.params.logit_bias]
        if biased:
            rows, ids, values = zip(*biased, strict=True)
            at = tuple(to_device((rows, ids), logits.device).unbind(0))
            logits.index_put_(at, to_device(values, logits.device, torch.float32), accumulate=True)
        banned = [(i, t) for i, r in active for t in _banned(r)]
        if banned:
            logits.index_put_(tuple(to_device(banned, logits.device).unbind(1)), logits.new_full((), _BANNED))
        for i, r in active:
            try:
                _process(r, logits[i])
            except BaseException as error:  # a caller's own code ends its own request: a row with a NaN is never sampled
                r.error = f"a logits_processor failed: {told(error)}"
                logits[i] = torch.nan
        return logits

    def _penalize(self, logits: Tensor, active: Sequence[tuple[int, Request]]) -> None:
        if not active or self._counts is None or self._prompt is None:
            return
        i, rows = to_device([(i, r.row) for i, r in active], logits.device).unbind(1)
        each = [(r.params.repetition_penalty, r.params.presence_penalty, r.params.frequency_penalty) for _, r in active]
        repetition, presence, frequency = to_device(each, logits.device, torch.float32)[:, :, None].unbind(1)
        x, counts = logits[i], self._counts[rows]
        seen = self._prompt[rows] | (counts > 0)
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        logits[i] = x - presence * (counts > 0) - frequency * counts


def _process(request: Request, logits: Tensor) -> None:
    for processor in request.params.logits_processor:
        row = processor([*request.prompt_token_ids, *request.token_ids], logits)
        if not isinstance(row, Tensor) or row.shape != logits.shape:
            raise ValueError(f"{processor!r} returned {row!r:.60}, expected logits of shape [{len(logits)}]")
        logits.copy_(row)


def _banned(request: Request) -> list[int]:
    """Tokens that would complete a bad word, and the end tokens while min_tokens are not reached."""
    p = request.params
    longest = max((len(word) for word in p.bad_words), default=0)
    ids = (request.prompt_token_ids[-longest:] + request.token_ids)[-longest:] if longest > 1 else []
    out = list(request.ends) if request.sampled < p.min_tokens else []
    for word in (*((t,) for t in p.bad_token_ids), *p.bad_words):
        head = word[:-1]
        if not head or tuple(ids[-len(head) :]) == head:
            out.append(word[-1])
    return out
