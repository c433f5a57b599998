"""How to sample: `SamplingParams`, named as in TensorRT-LLM's LLM API. Unknown arguments and bad values are errors that name them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """temperature: 0 is greedy; None (the default) is greedy too, unless top_k, top_p or min_p is given: then 1.
    top_k: keep the k likeliest (0: all). top_p: keep the smallest set that reaches p, in (0, 1].
    min_p: keep p >= min_p * p_max, in [0, 1].
    seed: the same seed gives the same text in any batch; None draws one when the request is admitted.
    max_tokens: tokens to generate at most. stop_token_ids: also end after one of these. ignore_eos: go on past the model's own end tokens.
    logprobs: None, or how many likeliest alternatives to report beside each token's own log-probability (0 to 20).
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int = 32
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        shaped = any(v is not None for v in (self.top_k, self.top_p, self.min_p))
        defaults = {"temperature": 1.0 if shaped else 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "stop_token_ids", id_tuple("SamplingParams: stop_token_ids", self.stop_token_ids))
        self._real("temperature", "a finite number, 0 or more", lambda v: v >= 0)
        self._integer("top_k", 0, 2**31 - 1)
        self._real("top_p", "more than 0, at most 1", lambda v: 0 < v <= 1)
        self._real("min_p", "0 to 1", lambda v: 0 <= v <= 1)
        if self.seed is not None:
            self._integer("seed", 0, MAX_SEED)
        self._integer("max_tokens", 1, 2**31 - 1)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"SamplingParams: ignore_eos is {self.ignore_eos!r}, expected True or False")
        if self.logprobs is not None:
            self._integer("logprobs", 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def _real(self, name, expected, allowed) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not allowed(value):
            raise ValueError(f"SamplingParams: {name} is {value!r}, expected {expected}")

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"SamplingParams: {name} is {value!r}, expected an integer from {low} to {high}")


def id_tuple(where: str, ids: Any) -> tuple[int, ...]:
    """Token ids, or one, as a tuple; the error begins with `where`."""
    if not isinstance(ids, Iterable | int):
        raise ValueError(f"{where} is {ids!r}, expected token ids")
    values = (ids,) if isinstance(ids, int) else tuple(ids)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{where} holds {value!r}, expected token ids")
    return values
