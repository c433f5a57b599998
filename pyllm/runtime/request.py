"""One request on its way through the engine: what the caller reads, and what the scheduler keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyllm.api.params import SamplingParams, check_prompt

if TYPE_CHECKING:
    from pyllm.api.retention import KvCacheRetentionConfig
    from pyllm.api.text import TextOutput


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a generated token before temperature and cuts, its rank (1: likeliest), and the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Request:
    """The caller's view: `token_ids` grows by one per step, the token that ended it included; `finish_reason` is None while it runs, then

    "stop" (`stop_reason`: the end token's id, or the stop string), "length" (max_tokens or the context is full), "abort", or "error"
    (`error` says what). prompt_logprobs: one entry per prompt token, None for the first, which nothing predicts.
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    index: int = 0  # which of n samples of one prompt
    priority: int = 0
    salt: str = ""
    retention: KvCacheRetentionConfig | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached_tokens: int = 0  # of the prompt, read from the prefix cache at the last admission
    timing: Timing = field(default_factory=lambda: Timing())
    listener: Callable[[Request], None] | None = field(default=None, repr=False)  # called by the engine at the end
    streaming: bool = field(default=False, repr=False)  # and after each token
    text: TextOutput | None = field(default=None, repr=False)  # where stop strings are looked for
    # Kept by the engine.
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False)  # prompt and output; see `sync_tokens`
    limit: int = field(default=0, repr=False)  # samples until the request is full
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False)
    keys: list[bytes] = field(default_factory=list, repr=False)  # of the full pages hashed so far
    named: int = field(default=0, repr=False)  # pages that the prefix cache knows by these keys; -1: no further ones
    seed: int = field(default=0, repr=False)
    row: int = field(default=-1, repr=False)
    computed: int = field(default=0, repr=False)  # of `target`: tokens whose keys and values launched steps have put into the cache
    target: int = field(default=0, repr=False)  # tokens that were known at admission: the first sample follows them
    sampled: int = field(default=0, repr=False)  # samples launched; the last one may still be under way
    ends: frozenset[int] = field(default=frozenset(), repr=False)
    watched: bool = field(default=False, repr=False)  # someone looks at each of its tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def decoding(self) -> bool:
        """All known tokens are in the cache, or on the way there: a step samples one more."""
        return self.computed == self.target > 0

    @property
    def next_position(self) -> int:
        """Position of the last token whose sampling was launched (or of the last known one): the next input."""
        return len(self.prompt_token_ids) + self.sampled - 1

    @property
    def text_token_ids(self) -> list[int]:
        """The output without the token that ended it, which is no part of the text."""
        ids = self.token_ids[:]  # a copy: the engine's thread may append, and says only later that a token was the end
        return ids[:-1] if ids and ids[-1] in self.ends else ids

    def priorities(self, first: int, end: int, page_size: int) -> NDArray[np.int32] | None:
        """Of its pages `first` up to `end`, for the time when nobody holds them; None: the usual one."""
        return None if self.retention is None else self.retention.priorities(first, end, page_size, len(self.prompt_token_ids))

    def order(self) -> tuple[int, int]:
        """Among those that wait: the smaller first."""
        return -self.priority, self.request_id

    def sync_tokens(self) -> NDArray[np.int32]:
        """`tokens`, with the output so far in it: a step only appends to `token_ids`."""
        self.tokens[len(self.prompt_token_ids) : self.length] = self.token_ids
        return self.tokens


@dataclass
class Timing:
    """Seconds on `time.perf_counter`'s clock; 0 until it has happened. tokens: when the host saw each."""

    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    tokens: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        return self.tokens[0] if self.tokens else 0.0

    @property
    def last_token(self) -> float:
        return self.tokens[-1] if self.tokens else 0.0


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + count of a request that is not generating yet."""

    request: Request
    start: int
    count: int

    @property
    def last(self) -> bool:
        """It reaches the last known token: only then is a token sampled."""
        return self.start + self.count == self.request.target


@dataclass(frozen=True)
class Plan:
    """decodes: in the order of their rows. drafts: the last token of each request with guesses behind it, instead of the other two."""

    decodes: list[Request]
    chunks: list[Chunk]
    drafts: list[Chunk] = field(default_factory=list)


def new_request(prompt_token_ids: Iterable[int], params: SamplingParams | None, vocab: int, limit: int, eos_ids: frozenset[int]) -> Request:
    """A request of a model with `vocab` tokens and a context of `limit`. ValueError for what it could never run."""
    params = SamplingParams() if params is None else params
    prompt = check_prompt(prompt_token_ids, params, vocab, limit)
    request = Request(-1, prompt, params)
    request.logprobs = None if params.logprobs is None else []
    request.prompt_logprobs = None if params.prompt_logprobs is None else [None] * len(prompt)
    request.tokens = np.zeros(min(len(prompt) + params.max_tokens, limit), np.int32)
    request.tokens[: len(prompt)] = prompt
    request.limit = len(request.tokens) - len(prompt)
    request.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
    return request
