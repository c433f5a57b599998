"""One request on its way through the engine: what the caller reads, and what the scheduler keeps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pyllm.runtime.params import SamplingParams


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

    "stop" (`stop_reason`: the end token's id), "length" (max_tokens or the context is full), "abort", or "error" (`error` says what).
    """

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    timing: Timing = field(default_factory=lambda: Timing())
    # Kept by the engine.
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False)  # prompt, then output; sized for both
    computed: int = field(default=0, repr=False)  # tokens whose keys and values are in the cache
    pages: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32), repr=False)
    seed: int = field(default=0, repr=False)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def text_token_ids(self) -> list[int]:
        """The output without the token that ended it, which is no part of the text."""
        return self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.token_ids.append(token)


@dataclass
class Timing:
    """Seconds on `time.perf_counter`'s clock; 0 until it has happened."""

    submitted: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def token(self) -> None:
        self.last_token = time.perf_counter()
        self.first_token = self.first_token or self.last_token
