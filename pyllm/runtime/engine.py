"""The executor: schedule -> pack -> forward -> sample -> append, a few lines per step, the same on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pyllm.runtime.batch import Batch
from pyllm.runtime.host import BlockPool
from pyllm.runtime.kv import KvPool, SlotSizes, free_bytes, page_bytes
from pyllm.runtime.params import SamplingParams, id_tuple
from pyllm.runtime.request import Request, TokenLogprob
from pyllm.runtime.sample import logprobs_of, sample
from pyllm.runtime.schedule import Scheduler
from pyllm.runtime.step import StepBuffers

# Share of the free memory that the KV pool takes when no size is given: the rest is for activations, and a CPU's memory is everybody's.
POOL_SHARE = {"cuda": 0.8, "cpu": 0.25}


class DecoderSpec(Protocol):
    """What the engine reads from a declaration (`pyllm.layers.Decoder`)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    def kv_slots(self) -> Mapping[int, SlotSizes]: ...


class Engine:
    """Runs many requests together over one model.

    spec: the declaration. weights: checkpoint name -> tensor, bound here, or a bound module (`module(batch) -> logits [R, V]`).
    pages or max_tokens: size of the KV pool, in pages (the dummy page included) or in tokens; neither: what max_batch full contexts need,
    at most a share of the free memory.
    max_batch: requests in a step. chunk: prompt tokens in a step, beside one token of each generating request.
    kv_dtype: of the cache, default `dtype`; float8_e4m3fn takes `kv_scales` (slot -> (k_scale, v_scale)). eos_ids: the model's end tokens.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor] | Callable[[Batch], Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = 64,
        pages: int | None = None,
        max_tokens: int | None = None,
        max_batch: int = 8,
        chunk: int = 512,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Mapping[int, tuple[Tensor, Tensor]] | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        sizes = {"max_batch": max_batch, "chunk": chunk, "page_size": page_size, "pages": pages, "max_tokens": max_tokens}
        for name, value in sizes.items():
            given = value is not None or name in ("max_batch", "chunk", "page_size")
            if given and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"Engine: {name} is {value!r}, expected an integer, at least 1")
        self.spec, self.device, self.eos_ids = spec, torch.device(device), frozenset(id_tuple("Engine: eos_ids", eos_ids))
        if self.device.type not in POOL_SHARE:
            raise ValueError(f"Engine: device is {self.device}, expected cpu or cuda")
        kv_dtype = kv_dtype or dtype
        if kv_dtype not in (dtype, torch.float8_e4m3fn):
            raise ValueError(f"Engine: kv_dtype is {kv_dtype}, expected {dtype} like dtype, or torch.float8_e4m3fn")
        if not isinstance(weights, Mapping) and not callable(weights):
            raise ValueError(f"Engine: weights is {weights!r}, expected a mapping of tensors or a bound module")
        self.module = _bind(spec, weights, self.device, dtype) if isinstance(weights, Mapping) else weights
        max_pages = -(-spec.max_positions // page_size)
        count = self._pool_pages(pages, max_tokens, page_size, kv_dtype, max_batch * max_pages)
        self.kv = KvPool(spec.kv_slots(), count, page_size, kv_dtype, self.device, kv_scales)
        self.pool = BlockPool(count)
        self._scheduler = Scheduler(self.pool, page_size=page_size, max_batch=max_batch, chunk=chunk)
        self._buffers = StepBuffers(
            max_tokens=max_batch + chunk,
            max_batch=max_batch,
            max_pages=min(max_pages, count - 1),  # no request can hold more than the pool has
            page_size=page_size,
            pages=count,
            vocab=spec.vocab_size,
            device=self.device,
        )
        self._next_id = 0

    def _pool_pages(self, pages: int | None, max_tokens: int | None, page_size: int, kv_dtype: torch.dtype, most: int) -> int:
        """Pages of the pool, the dummy page included."""
        size = page_bytes(self.spec.kv_slots(), page_size, kv_dtype)
        if pages is not None and max_tokens is not None:
            raise ValueError(f"Engine: pages={pages} and max_tokens={max_tokens} both size the KV pool, expected one of them")
        if pages is not None:
            return pages
        if max_tokens is not None:
            return -(-max_tokens // page_size) + 1
        share = int(free_bytes(self.device) * POOL_SHARE[self.device.type])
        return min(most + 1, max(share // max(size, 1), 2), (2**31 - 1) // page_size)

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a request. ValueError for one that can never run: a prompt that is empty or too long, a bad id, too few pages."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"submit: params is {params!r}, expected SamplingParams")
        if not isinstance(prompt_token_ids, Iterable):
            raise ValueError(f"submit: the prompt is {prompt_token_ids!r}, expected token ids")
        prompt, vocab, limit = list(prompt_token_ids), self.spec.vocab_size, self.spec.max_positions
        if not prompt:
            raise ValueError("submit: the prompt is empty, expected at least one token")
        if len(prompt) >= limit:
            raise ValueError(
                f"submit: the prompt has {len(prompt)} tokens, expected at most {limit - 1} (the context is {limit} positions)"
            )
        for name, ids in (("the prompt", prompt), ("stop_token_ids", params.stop_token_ids)):
            bad = [i for i in ids if isinstance(i, bool) or not isinstance(i, (int, np.integer)) or not 0 <= i < vocab]
            if bad:
                raise ValueError(f"submit: {name} holds {bad[0]!r}, expected token ids from 0 to {vocab - 1}")
        request = Request(self._next_id, [int(i) for i in prompt], params)
        request.logprobs = None if params.logprobs is None else []
        request.tokens = np.zeros(min(len(prompt) + params.max_tokens, limit), np.int32)
        request.tokens[: len(prompt)] = prompt
        need = self._scheduler.pages_needed(request)
        if need > self.pool.total:
            size = self.kv.page_size
            raise ValueError(
                f"submit: prompt and max_tokens need {len(request.tokens) - 1} tokens of KV cache ({need} pages), "
                f"the pool has {self.pool.total * size} ({self.pool.total} pages)"
            )
        self._next_id += 1
        self._scheduler.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now and give its pages back; nothing happens when it has ended already."""
        if not request.finished:
            if not self._scheduler.knows(request):
                raise ValueError(f"abort: request {request.request_id} is not one of this engine's")
            self._finish(request, "abort")

    def step(self) -> list[Request]:
        """Run one step; the requests that got a token or ended in it. [] when there is nothing to do."""
        if not self.has_work:
            return []
        work = self._scheduler.schedule()
        if not work:
            raise RuntimeError("Engine: requests wait although nothing runs and the pool is free")
        with torch.inference_mode():
            batch = self._buffers.pack(work, self.kv.caches)
            logits = self.module(batch)
            sampled = [w.request for w in work if w.wants_logits]
            if logits.shape[0] != len(sampled):
                raise RuntimeError(f"Engine: the model gave {logits.shape[0]} rows of logits, expected {len(sampled)}")
            tokens = sample(logits, sampled) if sampled else None
            logprobs = logprobs_of(logits, tokens, sampled) if tokens is not None else {}
        for w in work:
            w.request.computed = w.start + w.count
        for row, token in enumerate(tokens.tolist() if tokens is not None else ()):
            self._append(sampled[row], token, logprobs.get(row))
        return sampled

    def run(self) -> None:
        """Step until every request has ended."""
        while self.has_work:
            self.step()

    def _append(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        if not 0 <= token < self.spec.vocab_size:
            request.error = f"the model's logits at position {request.length - 1} hold no finite number or a NaN (sampled {token})"
            self._finish(request, "error")
            return
        request.append(token)
        request.timing.token()
        if request.logprobs is not None and logprob is not None:
            request.logprobs.append(logprob)
        if (token in self.eos_ids and not request.params.ignore_eos) or token in request.params.stop_token_ids:
            request.stop_reason = token
            self._finish(request, "stop")
        elif request.length == len(request.tokens):
            self._finish(request, "length")

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._scheduler.release(request)


def _bind(spec: DecoderSpec, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Callable[[Batch], Tensor]:
    from pyllm.layers import bind

    return bind(spec, weights, device=device, dtype=dtype)  # type: ignore[arg-type]
