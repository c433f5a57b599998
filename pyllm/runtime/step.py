"""The buffers of a step with prompt tokens in it: one host array that the packer fills, one copy to the device, one `Batch` of views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyllm.runtime.batch import Batch, KvCache
from pyllm.runtime.host import StepPacker
from pyllm.runtime.request import Request
from pyllm.runtime.rows import Rows
from pyllm.runtime.schedule import Plan

_UNKNOWN = np.zeros(1, np.int32)  # the last token of a generating request is on the device


@dataclass
class PackedStep:
    """rows `[S]` int64: of the requests that sample, generating ones first. sample_at `[S]`: their rows of the logits; None: all rows.

    prompt_rows: (request, first prompt position, first row of the logits, rows) of the chunks whose logits are wanted for themselves.
    """

    batch: Batch
    requests: list[Request]
    rows: Tensor
    sample_at: Tensor | None
    prompt_rows: list[tuple[Request, int, int, int]]


class StepBuffers:
    """Room for `max_tokens` tokens of `max_batch` sequences with up to `max_pages` pages each.

    All index arrays live in one int32 array, the page table last and dense at the step's width, so that a step is one copy of what it uses.
    """

    def __init__(
        self, *, max_tokens: int, max_batch: int, max_pages: int, page_size: int, pages: int, vocab: int, device: torch.device
    ) -> None:
        t, b = max_tokens, max_batch
        sizes = {"ids": t, "positions": t, "slots": t, "q_starts": b + 1, "kv_lens": b, "seq_lens": b, "logit_rows": t}
        sizes |= {"rows": b, "sample_at": b, "page_table": b * max_pages}
        self._at, end = {}, 0
        for name, size in sizes.items():
            self._at[name] = end
            end += -(-size // 4) * 4  # each array starts at a multiple of 16 bytes
        cuda = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros(end, dtype=torch.int32, device=device) if cuda else self._host
        self._copied = torch.cuda.Event() if cuda else None
        whole = self._host.numpy()
        arrays = {name: whole[self._at[name] : self._at[name] + size] for name, size in sizes.items()}
        self._page_size = page_size
        self._seq_lens, self._rows, self._sample_at = (arrays.pop(n) for n in ("seq_lens", "rows", "sample_at"))
        self._packer = StepPacker(**arrays, page_size=page_size, pages=pages, vocab=vocab)

    def pack(self, plan: Plan, rows: Rows, caches: Mapping[int, KvCache]) -> PackedStep:
        """The step's Batch, as views of these buffers: the next `pack` overwrites them, in the order of the stream on a GPU."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the last such step may still wait behind the step before it
        ends = [r.next_position + 1 for r in plan.decodes] + [c.start + c.count for c in plan.chunks]
        width = -(-max(ends) // self._page_size)
        packer, requests, prompt_rows = self._packer, [], []
        packer.begin(width)
        for r in plan.decodes:
            packer.add(_UNKNOWN, r.next_position, r.pages, 1)
            requests.append(r)
        for c in plan.chunks:
            wanted = c.count if c.request.params.prompt_logprobs is not None else int(c.last)
            if c.request.params.prompt_logprobs is not None and c.start < len(c.request.prompt_token_ids) - 1:
                prompt_rows.append((c.request, c.start, packer.rows, c.count))
            packer.add(c.request.tokens[c.start : c.start + c.count], c.start, c.request.pages, wanted)
            if c.last:
                self._sample_at[len(requests)] = packer.rows - 1
                requests.append(c.request)
        self._sample_at[: len(plan.decodes)] = np.arange(len(plan.decodes))
        self._seq_lens[: len(ends)] = [*ends[: len(plan.decodes)], *(c.request.target for c in plan.chunks)]
        self._rows[: len(requests)] = [r.row for r in requests]
        return self._to_device(plan, rows, caches, width, requests, prompt_rows)

    def _to_device(self, plan, rows, caches, width, requests, prompt_rows) -> PackedStep:
        t, b, n = self._packer.tokens, self._packer.sequences, len(requests)
        if self._copied is not None:
            used = self._at["page_table"] + b * width
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device.device))
        batch = Batch(
            ids=self._view("ids", t),
            positions=self._view("positions", t),
            slots=self._view("slots", t),
            q_starts=self._view("q_starts", b + 1),
            kv_lens=self._view("kv_lens", b),
            page_table=self._view("page_table", b * width).view(b, width),
            caches=caches,
            logit_rows=self._view("logit_rows", self._packer.rows),
            seq_lens=self._view("seq_lens", b),
            max_q=max([1] * bool(plan.decodes) + [c.count for c in plan.chunks]),
        )
        at = self._view("rows", n).long()
        decodes = len(plan.decodes)
        batch.ids[:decodes] = rows.token.index_select(0, at[:decodes])
        sample_at = self._view("sample_at", n).long() if n != self._packer.rows else None
        return PackedStep(batch, requests, at, sample_at, prompt_rows)

    def _view(self, name: str, size: int) -> torch.Tensor:
        return self._device[self._at[name] : self._at[name] + size]
