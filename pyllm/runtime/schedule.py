"""What runs in the next step.

A step has one token of each request that is generating, and prompt tokens of the others: as many as make it `chunk` tokens, and half of
`chunk` at least. A long prompt is spread over several steps, so it never holds up those that generate; and steps of one size run in the
same memory, and fill the tiles of the products. Requests wait in the order of their priority, then of their arrival.

Reserving (GUARANTEED_NO_EVICT): a request is admitted when the pool can hold all that it may ever need, so none gets stuck.
Not reserving (MAX_UTILIZATION): it is admitted when its known tokens fit, and gets pages as it grows. When none is left, the request that
would be admitted last gives back its pages and waits again; its tokens are computed anew as a prompt, what the prefix cache kept excepted.

With a grid (the deterministic mode) prompts are cut at its multiples, in steps without decodes, and pages are shared by whole cells of it:
what is computed for a token, and from what, is then a matter of its own request.
"""

from __future__ import annotations

import bisect
import secrets
import time
from typing import TYPE_CHECKING

import numpy as np

from pyllm.api.params import MAX_SEED
from pyllm.runtime.keys import PageTexts, extend_keys, root_key
from pyllm.runtime.offload import Move, WatchedPool
from pyllm.runtime.request import Chunk, Plan, Request
from pyllm.runtime.windows import Windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pyllm.runtime.draft import Propose
    from pyllm.runtime.host import BlockPool
    from pyllm.runtime.rows import Rows

LOGIT_ROWS = 512  # tokens of a chunk whose logits are all wanted: 131 MB in bf16 with 128k tokens in the vocabulary


class Scheduler:
    """Queues, pages, rows and the choice of work; knows nothing of tensors."""

    def __init__(
        self, pool: BlockPool | WatchedPool, rows: Rows, *, page_size: int, max_batch: int, chunk: int, reserve: bool = True,
        reuse: bool = True, partial: bool = False, grid: int = 0, moves: list[Move] | None = None, windows: Windows | None = None,
    ) -> None:  # fmt: skip
        """partial: reuse the beginning of a page too, by a copy. grid: 0, or a multiple of page_size, at most chunk and LOGIT_ROWS."""
        self.windows = windows or Windows({}, page_size)
        self._texts = PageTexts(pool.total) if partial and reuse and not grid and not self.windows else None
        self._moves = [] if moves is None else moves
        self.pool, self.rows, self.grid = pool, rows, grid
        self.page_size, self.max_batch, self.chunk = page_size, max_batch, chunk
        self.reserve, self.reuse = reserve, reuse
        self.waiting: list[Request] = []
        self.running: dict[Request, None] = {}  # in order of admission
        self._prefilling: dict[Request, None] = {}  # those of them that are not generating yet
        self.preemptions = 0

    def pages_needed(self, request: Request) -> int:
        """The last token that a request may generate is never an input, so it needs no place in the cache."""
        return -(-(len(request.tokens) - 1) // self.page_size)

    def enqueue(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=Request.order)

    def schedule(self, propose: Propose | None = None) -> Plan | None:
        """The work of the next step; None when there is nothing to launch. propose: guesses tokens of each request."""
        if not self.waiting or self.rows.top - self.rows.count > self.rows.top // 8:  # else those who wait fill the holes
            self.rows.compact()
        if not self.reserve:
            self._grow()
        self._admit()
        plan = self._plan(propose)
        if plan is not None:
            self.windows.launching(plan)
        return plan

    def _plan(self, propose: Propose | None) -> Plan | None:
        held = self.rows.held()
        if not self._prefilling and propose is not None and held:
            known = [r for r in held if r is not None]
            drafts = [self._draft(r, guesses) for r, guesses in zip(known, propose(known), strict=True)]
            if any(d.count > 1 for d in drafts):
                return Plan([], [], drafts)
        if not self._prefilling:  # the step that must be quick
            decodes: list = held if self.rows.top == self.rows.count else [r for r in held if r is not None]
            return Plan(decodes, []) if held else None
        decodes = [] if self.grid else [r for r in held if r is not None and r.decoding]
        chunks, budget = [], max(self.chunk - len(decodes), -(-self.chunk // 2))
        for request in self._prefilling:
            count = self._chunk(request, budget)
            if count:
                chunks.append(Chunk(request, request.computed, count))
                budget -= count
        return Plan(decodes, chunks)

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of a prompt that the step takes."""
        count = request.target - request.computed
        if self.grid:
            count = min(count, self.grid - request.computed % self.grid)
            return count if count <= budget else 0
        return min(count, budget, LOGIT_ROWS if request.params.prompt_logprobs is not None else count)

    def _draft(self, request: Request, guesses: NDArray[np.int32]) -> Chunk:
        """The last token and guesses: within the request's limit and its pages; put behind the known tokens, where they are no output."""
        n, at = request.length, request.next_position
        guesses = guesses[: max(0, min(request.limit - request.sampled - 1, len(request.pages) * self.page_size - n))]
        request.sync_tokens()[n : n + len(guesses)] = guesses
        return Chunk(request, at, 1 + len(guesses))

    def take_moves(self) -> list[Move]:
        """Copies of pages, to be made in this order before the step that was just scheduled."""
        moves = self._moves[:]
        self._moves.clear()
        if isinstance(self.pool, WatchedPool):
            self.pool.reading.clear()
        return moves

    def launched(self, plan: Plan) -> None:
        """The step is on its way: count it, name the pages it fills, free the rows of those that need no further one."""
        for chunk in plan.chunks:
            chunk.request.computed += chunk.count
            self.name_pages(chunk.request, chunk.request.computed)
            if chunk.last:
                del self._prefilling[chunk.request]
        for request in (*plan.decodes, *(c.request for c in plan.chunks if c.last)):
            request.sampled += 1
            if request.sampled == request.limit:
                self.rows.clear(request)
        self.windows.launched(plan)

    def _admit(self) -> None:
        """Requests in their order, until one does not fit or their prompts fill the step: to admit one takes the host 0.1 ms. One whose
        beginning another is just computing is passed over until then."""
        if not self.waiting:
            return
        coming = {k for r in self._prefilling if self.reuse and r.named >= 0 for k in r.keys[r.named :]}
        at, room = 0, self.chunk - sum(self._chunk(r, self.chunk) for r in self._prefilling)
        while at < len(self.waiting) and self.rows.count < self.max_batch and room > 0:
            request = self.waiting[at]
            if request.sampled != len(request.token_ids):
                return  # preempted a moment ago: its last token is still under way
            request.sync_tokens()
            fits = self._take_pages(request, coming)
            if fits is None:
                at += 1
                continue
            if not fits:
                return
            if not request.timing.admitted:
                request.seed = secrets.randbelow(MAX_SEED + 1) if request.params.seed is None else request.params.seed
                request.timing.admitted = time.perf_counter()
            self.rows.assign(request)
            self.running[request] = self._prefilling[self.waiting.pop(at)] = None
            room -= self._chunk(request, self.chunk)
            coming.update(request.keys[request.named :] if self.reuse else ())

    def _take_pages(self, request: Request, coming: set[bytes]) -> bool | None:
        """Pages for all that the request may need, or (not reserving) for its known tokens and the next; known prefixes from the cache.

        False: there are too few. None: the next page of its prefix is coming.
        """
        target, need = request.length, self.pages_needed(request)
        need = need if self.reserve else min(need, target // self.page_size + 1)
        found, full, cell = self.pool.allocate(0), 0, self.grid or self.page_size
        if self.reuse and request.params.prompt_logprobs is None:
            full = (target - 1) // cell * cell // self.page_size  # the last known token is computed in any case: its logits are wanted
            extend_keys(request.keys, root_key(request.salt), request.tokens, full, self.page_size)
            found = self.pool.match(b"".join(request.keys[:full]))
            whole = len(found) * self.page_size // cell * cell // self.page_size
            while whole and not self.windows.readable(found[:whole]):
                whole -= cell // self.page_size
            self.pool.free(found[whole:])
            found = found[:whole]
            if len(found) < full and request.keys[len(found)] in coming:
                self.pool.free(found)
                return None
            self._name(request, 0, found if request.retention else found[:0])
        kept = self.pool.load(request.keys[len(found) : full], cell // self.page_size) if isinstance(self.pool, WatchedPool) else []
        missing = need - len(found)
        if missing > self.pool.available:
            self.pool.free(found)
            return False
        # The source of a copy is held until the copy is ordered, so there must be room beside it.
        part, shared = self._part(request, len(found)) if 0 < missing < self.pool.available and not kept else (found[:0], 0)
        fresh = self.pool.allocate(missing)
        if shared:
            self._moves.append(("copy", int(part[0]), int(fresh[0])))
        self.pool.free(part)  # whoever gets it next writes to it after the copy
        known = self._load(request, kept, len(found), fresh)
        request.pages = found if not len(fresh) else fresh if not len(found) else np.concatenate([found, fresh])
        ready = len(found) + len(kept)
        request.target, request.computed, request.named = target, ready * self.page_size + shared, ready if known else -1
        request.cached_tokens = request.computed
        self.windows.admit(request)
        return True

    def _load(self, request: Request, kept: list[int], first: int, fresh: NDArray[np.int32]) -> bool:
        """Bring pages back from the host, behind the first ones; whether the pool knows them by their names again."""
        self._moves += [("load", at, page) for at, page in zip(kept, fresh.tolist(), strict=False)]
        return self._name(request, first, fresh[: len(kept)]) == len(kept)

    def _part(self, request: Request, pages: int) -> tuple[NDArray[np.int32], int]:
        """A page, held, whose first tokens are those of the request behind so many reused pages; and how many."""
        if self._texts is None or request.params.prompt_logprobs is not None:
            return self.pool.allocate(0), 0
        start = pages * self.page_size
        before = request.keys[pages - 1] if pages else root_key(request.salt)
        key, count = self._texts.best(before, request.tokens[start : min(start + self.page_size, request.length - 1)])
        page = self.pool.match(key)
        if count and not len(page):
            self._texts.remove(key)
        return page, count * len(page)

    def _grow(self) -> None:
        """A page for each generating request whose next token begins one; the last in order give way."""
        for request in sorted(self.running, key=Request.order):
            if request.row < 0 or not request.decoding or request.next_position < len(request.pages) * self.page_size:
                continue
            while self.pool.available == 0 and request.row >= 0:
                self._preempt(max((r for r in self.running if r.row >= 0), key=Request.order))
            if request.row >= 0:
                request.pages = np.concatenate([request.pages, self.pool.allocate(1)])
                self.windows.renew(request, len(request.pages) - 1)
                self.rows.changed(request)

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._drop(request)
        request.computed = request.target = 0
        self.enqueue(request)

    def name_pages(self, request: Request, stored: int) -> None:
        """Let the prefix cache know the full pages among the first `stored` tokens, which the host must know."""
        if self.grid:
            stored = min(stored, len(request.prompt_token_ids) // self.grid * self.grid)
        full = stored // self.page_size
        if self.reuse and 0 <= request.named < full:
            extend_keys(request.keys, root_key(request.salt), request.sync_tokens(), full, self.page_size)
            new = full - request.named
            known = self._name(request, request.named, request.pages[request.named : full])
            if self._texts is not None:
                names = [root_key(request.salt), *request.keys[:full]]
                self._texts.add_pages(names, request.tokens, self.page_size, request.named, request.named + known)
            request.named = full if known == new else -1

    def _name(self, request: Request, first: int, pages: NDArray[np.int32]) -> int:
        """Tell the pool what these pages hold, its pages from `first` on, and what they are worth; how many it knows by it."""
        end = first + len(pages)
        return self.pool.cache(b"".join(request.keys[first:end]), pages, request.priorities(first, end, self.page_size))

    def forget(self) -> None:
        """What the pages hold is not to be trusted: no prompt reads it any more."""
        self.pool.forget()
        self.windows.forget()

    def knows(self, request: Request) -> bool:
        return request in self.running or request in self.waiting

    def release(self, request: Request) -> None:
        """Forget a request, wherever it is, and give its pages back.

        Steps under way may still write to them. That is safe: whoever gets the pages next writes in a later step of the same stream.
        """
        if request in self.running:
            self._drop(request)
        else:
            self.waiting.remove(request)
        if not self.running:
            self.pool.check()
            self.windows.check()
            if self.pool.used:
                raise RuntimeError(f"Scheduler: {self.pool.used} pages are held although nothing runs")

    def _drop(self, request: Request) -> None:
        stored = request.next_position if request.decoding else request.computed
        self.name_pages(request, min(stored, request.length))
        if request.row >= 0:
            self.rows.clear(request)
        del self.running[request]
        self._prefilling.pop(request, None)
        self.windows.leave(request)
        self.pool.free(request.pages)
        request.pages = request.pages[:0]
