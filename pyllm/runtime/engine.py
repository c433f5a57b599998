"""The executor: schedule -> launch -> read the tokens of the step before, a few lines per step, the same on a CPU and on a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pyllm.api.checks import POOL_SHARE, DecoderSpec, check_draft, check_fits, check_sizes, check_types, grid_of, told
from pyllm.api.params import SamplingParams, check_order
from pyllm.layers.apart import apart
from pyllm.plan.calibrate import find_scales
from pyllm.plan.pages import Stored, count_pages, free_bytes
from pyllm.runtime.batch import Batch
from pyllm.runtime.draft import DraftModel, accepted, by_lookup
from pyllm.runtime.graph import step_sizes
from pyllm.runtime.host import BlockPool
from pyllm.runtime.kv import KvPool
from pyllm.runtime.offload import watched
from pyllm.runtime.request import Chunk, Request, new_request
from pyllm.runtime.runner import Flight, Runner
from pyllm.runtime.schedule import Scheduler
from pyllm.runtime.shape import SPOILED
from pyllm.runtime.tape import Tape
from pyllm.runtime.windows import Windows


class Engine:
    """Runs many requests together over one model.

    spec: the declaration. weights: checkpoint name -> tensor, bound here, or a bound module (`module(batch) -> logits [R, V]`).
    pages or max_tokens: size of the KV pool, in pages (the dummy page included) or in tokens; neither: what max_batch full contexts need,
    at most `memory_share` of the memory that is free beside `spare_bytes` (activations; twice, if a graph keeps those of a full chunk).
    max_batch: requests in a step. chunk: tokens in a step with prompts, one of each generating request among them.
    max_length: tokens of a request, prompt and output; None: the model's context.
    kv_dtype: of the cache, default `dtype`; float8_e4m3fn and int8 take `kv_scales` (slot -> (k_scale, v_scale)), and int8 finds its own
    without them. eos_ids: the model's end tokens.
    reserve=False admits more requests than the pool can hold in the end, and computes some anew when it is full. reuse: keep the pages of
    known prefixes; partial: and read a page's beginning where a prompt parts from it. tiers: bytes of the host's memory for pages that
    others get, and how many events to keep of what comes and goes. overlap: launch a step before the tokens of the one before are read
    (None: on a GPU); `step` then returns the requests of the step before. graph_sizes: batch sizes of decode steps, captured as CUDA graphs
    on a GPU; None: chosen by max_batch there; [] off.
    mixed_sizes: the same for numbers of tokens of steps with prompts; None: up to 1024, and chunk, where graph_sizes is not [].
    draft_len: guess so many tokens of each greedy request from what followed its last draft_ngram tokens before, or with draft_model, a
    second (declaration, weights or bound module) of the same vocabulary, what that one would say; runs without overlap.
    deterministic: a request has the same bits in any company (docs/executor.md); on CUDA the module is bound with invariant=True.
    """

    steps = drafted = accepted = 0  # launched steps; guessed tokens, and how many of them were right
    host_seconds = 0.0  # of launched steps: the time in which the host did not wait for the device
    decode_steps, decode_host_seconds = 0, 0.0  # of those without prompts

    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, Tensor] | Callable[[Batch], Tensor], *, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32, page_size: int = 64, pages: int | None = None, max_tokens: int | None = None,
        memory_share: float | None = None, spare_bytes: int = 0, max_batch: int = 8, chunk: int = 512, max_length: int | None = None,
        kv_dtype: torch.dtype | None = None, kv_scales: Mapping[int, tuple[Tensor, Tensor]] | None = None, eos_ids: Iterable[int] = (),
        reserve: bool = True, reuse: bool = True, partial: bool = False, tiers: tuple[int, int] = (0, 0), overlap: bool | None = None,
        graph_sizes: Sequence[int] | None = None, mixed_sizes: Sequence[int] | None = None, draft_len: int = 0, draft_ngram: int = 3,
        draft_model: tuple[DecoderSpec, Mapping[str, Tensor] | Callable[[Batch], Tensor]] | None = None, deterministic: bool = False,
        progress: bool = False,
    ) -> None:  # fmt: skip
        sizes = {"max_batch": max_batch, "chunk": chunk, "page_size": page_size, "draft_ngram": draft_ngram}
        check_sizes(sizes, {"pages": pages, "max_tokens": max_tokens, "max_length": max_length}, spec)
        self.spec, self.device, self.max_length = spec, torch.device(device), max_length or spec.max_positions
        kv_dtype, self.eos_ids = check_types(self.device, dtype, kv_dtype or dtype, weights, eos_ids)
        cuda, most = self.device.type == "cuda", max_batch * (1 + draft_len) + chunk
        module = self._bound(spec, weights, dtype, deterministic)
        grid = grid_of(spec, module, cuda, kv_dtype, page_size, chunk, reserve) if deterministic else 0
        self.dtype, self.max_batch, self.chunk, self.reserve = dtype, max_batch, chunk, reserve
        stored = [(spec, kv_dtype)] if draft_model is None else [(spec, kv_dtype), (draft_model[0], dtype)]
        graph_sizes, mixed_sizes = step_sizes(graph_sizes, mixed_sizes, cuda, max_batch, most, chunk, stored, dtype, page_size)
        pages = pages or self._pages(max_tokens, memory_share, spare_bytes * (1 + (chunk in mixed_sizes)), page_size, most, stored)
        windows = Windows.of(spec.kv_slots(), page_size, max_batch, most, pages, self.device)
        kv_scales = kv_scales or find_scales(module, spec, dtype, kv_dtype, page_size, self.device)
        self.kv = KvPool(spec.kv_slots(), pages, page_size, kv_dtype, self.device, kv_scales, windows.each)
        self._pools = [self.kv]
        draft = self._draft_model(*draft_model, draft_len) if draft_model else None
        self.pool, moves = watched(BlockPool(pages), self._pools, *tiers, bool(windows))
        self._runner = Runner(
            module, self.kv, vocab=spec.vocab_size, max_batch=max_batch, max_length=self.max_length, max_tokens=most,
            decode_sizes=graph_sizes, mixed_sizes=mixed_sizes, draft=draft, guess_rows=most - chunk if grid else 0,
        )  # fmt: skip
        self._scheduler = Scheduler(
            self.pool, self._runner.rows, page_size=page_size, max_batch=max_batch, chunk=chunk, reserve=reserve, reuse=reuse,
            partial=partial, grid=grid, moves=moves, windows=windows,
        )  # fmt: skip
        self._runner.capture(progress)
        self._tape = Tape(self._runner.rows, spec.vocab_size, usable=reserve and not windows and not draft_len)
        self.hand_out = self._tape.hand_out  # brings all requests up to date: `step` may keep tokens that nobody watches for a few steps
        self._propose = None if not draft_len else self._runner.guess if draft else by_lookup(draft_len, draft_ngram)
        self.overlap = (cuda if overlap is None else overlap) and not draft_len
        self._flights, self._next_id, self._vocab = deque[Flight](), 0, spec.vocab_size

    def _pages(self, max_tokens: int | None, share: float | None, spare_bytes: int, page_size: int, step: int, stored: Stored) -> int:
        """Of the pool, the dummy page included; step: tokens of one."""
        tokens = max_tokens or self.max_batch * -(-self.max_length // page_size) * page_size
        room = None
        if share is not None or max_tokens is None:
            room = int(max(free_bytes(self.device) - spare_bytes, 0) * (share or POOL_SHARE[self.device.type]))
        return count_pages(tokens, page_size, self.max_batch, step, stored, room)

    def _draft_model(self, spec: DecoderSpec, weights: Mapping[str, Tensor] | Callable[[Batch], Tensor], most: int) -> DraftModel:
        check_draft(self.spec, spec, self.max_length, most)
        self._pools.append(KvPool(spec.kv_slots(), self.kv.pages, self.kv.page_size, self.dtype, self.device))
        return DraftModel(self._bound(spec, weights, self.dtype, False), self._pools[1].caches, self.kv.page_size, self.max_length, most)

    def _bound(
        self, spec: DecoderSpec, weights: Mapping[str, Tensor] | Callable[[Batch], Tensor], dtype: torch.dtype, invariant: bool
    ) -> Callable[[Batch], Tensor]:
        from pyllm.layers import bind  # here: its modules import `Batch` from this package

        if isinstance(weights, Mapping):
            weights = bind(spec, weights, device=self.device, dtype=dtype, invariant=invariant)  # type: ignore[arg-type]
        return apart(weights) if invariant and self.device.type == "cpu" else weights

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting or self._flights)

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions

    @property
    def running(self) -> list[Request]:
        return list(self._scheduler.running)

    @property
    def waiting(self) -> list[Request]:
        return list(self._scheduler.waiting)

    def prepare(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, *, priority: int = 0, salt: str = ""
    ) -> Request:
        """A request that `enqueue` takes; may be called from any thread. ValueError for one that can never run: a prompt that is empty
        or too long, a bad id, too few pages."""
        check_order(priority, salt)
        request = new_request(prompt_token_ids, params, self._vocab, self.max_length, self.eos_ids)
        request.priority, request.salt = priority, salt
        check_fits(len(request.tokens) - 1, self._scheduler.pages_needed(request), self.pool.total, self.kv.page_size)
        return request

    def enqueue(self, request: Request) -> Request:
        request.request_id = self._next_id
        self._next_id += 1
        request.watched = request.streaming or request.text is not None
        self._scheduler.enqueue(request)
        return request

    def submit(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, *, priority: int = 0, salt: str = ""
    ) -> Request:
        """Queue a request. priority: larger ones are admitted first. salt: only requests of one salt share prefixes."""
        return self.enqueue(self.prepare(prompt_token_ids, params, priority=priority, salt=salt))

    def abort(self, request: Request, reason: str = "abort") -> None:
        """End a request now and give its pages back; nothing happens when it has ended already."""
        if not request.finished:
            if not self._scheduler.knows(request):
                raise ValueError(f"abort: request {request.request_id} is not one of this engine's")
            self._finish(request, reason)

    def step(self) -> list[Request]:
        """Launch a step and read a launched one; the requests that got a token or ended in what was read. [] when nothing was read."""
        start, waited, moved = time.perf_counter(), 0.0, list[Request | None]()
        plan = self._scheduler.schedule(self._propose if self._runner.traits.plain else None)
        if plan is not None:
            moves = self._scheduler.take_moves()
            for kv in self._pools if moves else ():
                kv.move(moves)
            if plan.chunks:
                self._tape.hand_out()
            self._flights.append(self._runner.launch(plan))
            if not self._tape.launched(plan, self._runner.traits):
                self._scheduler.launched(plan)
            self.steps += 1
        elif self._scheduler.waiting and not self._flights:
            raise RuntimeError("Engine: requests wait although nothing runs and the pool is free")
        under_way = int(plan is not None and self.overlap and not self._runner.traits.waits)
        while len(self._flights) > under_way:
            seconds, some = self._read()
            waited, moved = waited + seconds, moved + some if moved else some
        host = time.perf_counter() - start - waited - self._runner.take_guess_seconds()
        self.host_seconds += host
        if plan is not None and not plan.chunks:
            self.decode_steps, self.decode_host_seconds = self.decode_steps + 1, self.decode_host_seconds + host
        return moved  # type: ignore[return-value]  # idle rows are in no list that is given out

    def run(self) -> None:
        """Step until every request has ended."""
        while self.has_work:
            self.step()

    def _read(self) -> tuple[float, list[Request | None]]:
        """Take in the tokens of the oldest step under way; the seconds spent waiting for them, and whose they are."""
        flight, start = self._flights.popleft(), time.perf_counter()
        tokens = flight.wait()
        now, moved = time.perf_counter(), list[Request | None]()
        if self._tape.read(flight.requests, tokens, now):
            return now - start, flight.requests
        for asked, at, logprobs in flight.prompt_logprobs:
            assert asked.prompt_logprobs is not None
            asked.prompt_logprobs[at : at + len(logprobs.tops)] = logprobs.read()
        if flight.logprobs is not None:
            for owner, entry in zip(flight.logprobs[0], flight.logprobs[1].read(), strict=True):
                if owner.finish_reason is None and owner.logprobs is not None and entry.rank:
                    owner.logprobs.append(entry)
        if flight.drafts:
            self._read_drafts(flight.drafts, tokens.tolist(), now, moved)
        for request, token in zip(flight.requests, tokens.tolist() if flight.requests else (), strict=True):
            if request is not None and request.finish_reason is None:
                moved.append(request)
                self._append(request, token, now)
        return now - start, moved

    def _append(self, request: Request, token: int, now: float) -> None:
        if not 0 <= token < self._vocab:
            self._fail_sample(request, token)
            return
        request.token_ids.append(token)
        request.timing.tokens.append(now)
        if token in request.ends or request.watched or len(request.token_ids) == request.limit:
            self._check_end(request, token)

    def _read_drafts(self, drafts: list[Chunk], tokens: list[int], now: float, moved: list[Request | None]) -> None:
        at = 0
        for chunk in drafts:
            request, chosen = chunk.request, tokens[at : at + chunk.count]
            at += chunk.count
            guesses = request.tokens[request.length : request.length + chunk.count - 1].tolist()
            given = accepted(guesses, chosen)
            self.drafted, self.accepted = self.drafted + len(guesses), self.accepted + len(given) - 1
            moved.append(request)
            for token in given:
                request.sampled += 1
                self._append(request, token, now)
                if request.finished:
                    break
            else:
                self._scheduler.rows.changed(request, request.token_ids[-1])

    def _fail_sample(self, request: Request, token: int) -> None:
        own = ", once the request's own changes are applied," * (token == SPOILED)
        wrong = f"the model's logits at position {request.length - 1}{own} hold no finite number or a NaN (sampled {token})"
        request.error = request.error or wrong  # of its logits_processor
        if not own:
            self._scheduler.forget()  # pages of this request may hold what made them so
        self._finish(request, "error")

    def _check_end(self, request: Request, token: int) -> None:
        if token in request.ends:
            request.stop_reason = token
        elif request.text is not None:
            try:
                request.stop_reason = request.text.find_stop(request.token_ids, request.params.min_tokens)
            except BaseException as error:  # a tokenizer may be anybody's code, and native code that panics raises more than an Exception
                request.error = f"the tokenizer failed on token {token}: {told(error)}"
        if request.error is not None:
            self._finish(request, "error")
        elif request.stop_reason is not None or len(request.token_ids) == request.limit:
            self._finish(request, "length" if request.stop_reason is None else "stop")
        elif request.streaming and request.listener is not None:
            request.listener(request)

    def _finish(self, request: Request, reason: str) -> None:
        self._tape.hand_out()
        request.finish_reason = reason
        if reason == "error":
            request.named = -1
        self._scheduler.release(request)
        if request.listener is not None:
            request.listener(request)

    def fail(self, message: str) -> None:
        """End every request with an error: the way out when a step has raised."""
        self._flights.clear()
        self._scheduler.take_moves()
        for request in (*self.running, *self.waiting):
            request.error = message
            self._finish(request, "error")
        self._scheduler.forget()
