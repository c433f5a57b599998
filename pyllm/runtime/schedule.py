"""What runs in the next step: first come, first served, nothing is ever evicted.

A request is admitted when the pool can hold all it may ever need (prompt and max_tokens), so that no running request can get stuck. A step
has one token of each request that is generating, and beside them up to `chunk` prompt tokens of the others: a long prompt is spread over
several steps.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllm.runtime.params import MAX_SEED
from pyllm.runtime.request import Request

if TYPE_CHECKING:
    from pyllm.runtime.host import BlockPool


@dataclass(frozen=True)
class Work:
    """One sequence's share of a step: tokens start .. start + count of the request."""

    request: Request
    start: int
    count: int

    @property
    def wants_logits(self) -> bool:
        """True for the part that reaches the last known token: only then is a token sampled."""
        return self.start + self.count == self.request.length


class Scheduler:
    """Queues, page reservations and the choice of work; knows nothing of tensors."""

    def __init__(self, pool: BlockPool, *, page_size: int, max_batch: int, chunk: int) -> None:
        self.pool, self.page_size, self.max_batch, self.chunk = pool, page_size, max_batch, chunk
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def pages_needed(self, request: Request) -> int:
        """The last token that a request may generate is never an input, so it needs no place in the cache."""
        return -(-(len(request.tokens) - 1) // self.page_size)

    def schedule(self) -> list[Work]:
        """The work of the next step: generating requests first (one block for the decode kernel), then prompts in order of arrival."""
        self._admit()
        decodes = [Work(r, r.computed, 1) for r in self.running if r.token_ids]
        prompts, budget = [], self.chunk
        for request in self.running:
            count = min(len(request.prompt_token_ids) - request.computed, budget)
            if not request.token_ids and count > 0:
                prompts.append(Work(request, request.computed, count))
                budget -= count
        return decodes + prompts

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            request = self.waiting[0]
            need = self.pages_needed(request)
            if need > self.pool.available:
                return
            request.pages = self.pool.allocate(need)
            request.seed = secrets.randbelow(MAX_SEED + 1) if request.params.seed is None else request.params.seed
            request.timing.admitted = time.perf_counter()
            self.running.append(self.waiting.popleft())

    def knows(self, request: Request) -> bool:
        return request in self.running or request in self.waiting

    def release(self, request: Request) -> None:
        """Forget a request, wherever it is, and give its pages back."""
        if request in self.running:
            self.running.remove(request)
            self.pool.free(request.pages)
            request.pages = request.pages[:0]
        else:
            self.waiting.remove(request)
        if not self.running:
            self.pool.check()
            if self.pool.used:
                raise RuntimeError(f"Scheduler: {self.pool.used} pages are held although nothing runs")
