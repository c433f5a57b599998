"""Tokens of decode steps, kept together for up to `STEPS` steps before each request gets its own.

To give a request its token is to touch a dozen places in memory, which nothing else uses in between: 0.3 us a request where 256 of them
stay in the host's caches, 0.7 us with 1024. So where no one looks at single tokens, nothing is done for each request of a step, and a block
of steps costs hardly more than one. Whatever comes, ends, fails or is aborted: what is known is handed out first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pyllm.runtime.request import Plan, Request
from pyllm.runtime.rows import Rows
from pyllm.runtime.sample import Traits


class Tape:
    """rows: whose requests they are. vocab: tokens outside it have failed. usable: False where a step needs to know all those before."""

    ROWS, STEPS = 64, 32  # with fewer requests a step costs little; so many steps at most are kept

    def __init__(self, rows: Rows, vocab: int, usable: bool) -> None:
        self._rows, self._vocab, self._usable = rows, vocab, usable
        self._requests: list[Request | None] = []  # of one version of the rows; empty: nothing is kept
        self._ends = frozenset[int]()
        self._tokens, self._times = list[NDArray[np.int32]](), list[float]()
        self._launched = self._left = 0  # steps that are not in `sampled` yet; those that may still be kept
        self._seen = self._refused = -1  # versions of the rows: at the last launch, and the one for which it is no use to try

    def launched(self, plan: Plan, traits: Traits) -> bool:
        """Whether this step, just launched, is counted here; if not, everything has been handed out."""
        held = self._rows.held()
        if self._requests is not held:
            self.hand_out()
            self._open(plan, held, traits)
        if self._left <= 1:
            self.hand_out()
            return False
        self._left -= 1
        self._launched += 1
        return True

    def _open(self, plan: Plan, held: list[Request | None], traits: Traits) -> None:
        before, self._seen = self._seen, self._rows.version  # to look at each request pays where they stay for a while
        if before != self._seen or before == self._refused or not self._usable or plan.decodes is not held or len(held) < self.ROWS:
            return
        if traits.shaped or traits.logprobs or traits.waits or any(r.watched for r in plan.decodes):
            self._refused = self._rows.version
            return
        self._requests, self._ends = held, frozenset().union(*(r.ends for r in plan.decodes))
        self._left = min(self.STEPS + 1, *(r.limit - r.sampled for r in plan.decodes))

    def read(self, requests: object, tokens: NDArray[np.int32], now: float) -> bool:
        """Whether these tokens of a step are kept here; if not, everything has been handed out."""
        known = requests is self._requests and requests is self._rows.held() and tokens.min() >= 0 and tokens.max() < self._vocab
        if not known or (self._ends and not self._ends.isdisjoint(tokens.tolist())):
            self.hand_out()
            return False
        self._tokens.append(tokens)
        self._times.append(now)
        return True

    def hand_out(self) -> None:
        """Bring every request up to date."""
        if self._launched or self._times:
            columns = np.stack(self._tokens).T.tolist() if self._tokens else [()] * len(self._requests)
            for request, ids in zip(self._requests, columns, strict=True):
                assert request is not None
                request.sampled += self._launched
                request.token_ids += ids
                request.timing.tokens += self._times
            self._tokens, self._times, self._launched = [], [], 0
        self._requests, self._left = [], 0
