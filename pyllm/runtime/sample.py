"""From the logits of a step to its tokens and log-probabilities, on the device; and back to the host without waiting for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pyllm.ops.sampling import sample_tokens, token_logprobs
from pyllm.runtime.request import Request, TokenLogprob

_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # and their values that change nothing


@dataclass
class Traits:
    """What the requests of a step ask for, so that a step does only that. Made anew when requests come or go."""

    greedy: bool = True
    filters: frozenset[str] = frozenset()
    shaped: bool = False  # logits are changed before sampling
    waits: bool = False  # the host must know all tokens before it can launch a step
    logprobs: bool = False

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Traits:
        each = [r.params for r in requests]
        return cls(
            greedy=all(p.greedy for p in each),
            filters=frozenset(n for n, off in _FILTERS.items() if any(getattr(p, n) != off for p in each)),
            shaped=any(p.shaped for p in each),
            waits=any(p.waits for p in each),
            logprobs=any(p.logprobs is not None for p in each),
        )

    @property
    def plain(self) -> bool:
        """The largest logit is all that is wanted."""
        return self.greedy and not self.shaped and not self.logprobs

    def sample(self, logits: Tensor, arguments: dict[str, Tensor]) -> Tensor:
        """Token ids `[R]` int32; -1 where a row has a NaN."""
        if self.greedy:
            return sample_tokens(logits)
        return sample_tokens(logits, **{n: t for n, t in arguments.items() if n not in _FILTERS or n in self.filters})


def to_device(values: Sequence | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host values on the device without waiting for it: `torch.tensor(values, device="cuda")` would wait for all that was launched."""
    t = torch.as_tensor(values, dtype=dtype)
    return t if device.type == "cpu" else t.pin_memory().to(device, non_blocking=True)


def to_host(t: Tensor) -> Tensor:
    """A copy in host memory; on a GPU it is there once the stream has come so far."""
    if t.device.type == "cpu":
        return t.clone()
    host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
    return host.copy_(t, non_blocking=True)


@dataclass
class Logprobs:
    """Log-probabilities under way: for each entry of `tops` (how many alternatives its owner wants) one row."""

    tops: list[int]
    tensors: list[Tensor] = field(default_factory=list)

    @classmethod
    def start(cls, logits: Tensor, tokens: Tensor, rows: Sequence[int], tops: Sequence[int]) -> Logprobs:
        """rows: of the logits and tokens; a negative token, of a row that failed, has rank 0."""
        if len(rows) < len(logits):
            index = to_device(rows, logits.device)
            logits, tokens = logits[index], tokens[index]
        return cls(list(tops), [to_host(t) for t in (tokens, *token_logprobs(logits, tokens, max(tops)))])

    def read(self) -> Iterator[TokenLogprob]:
        tokens, logprob, rank, top, top_ids = (t.tolist() for t in self.tensors)
        for j, n in enumerate(self.tops):
            yield TokenLogprob(tokens[j], logprob[j], rank[j], tuple(zip(top_ids[j][:n], top[j][:n], strict=True)))
