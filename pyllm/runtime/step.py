"""The buffers of a step with prompt tokens in it: one host array that the packer fills, one copy to the device, one `Batch` of views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pyllm.runtime.batch import Batch, KvCache
from pyllm.runtime.host import StepPacker
from pyllm.runtime.request import Chunk, Request
from pyllm.runtime.rows import Rows
from pyllm.runtime.schedule import Plan

_UNKNOWN = np.zeros(1, np.int32)  # the last token of a generating request is on the device


def padded_rows(size: tuple[int, int]) -> int:
    """Rows of logits of a padded step: one for each sequence, and for guesses as many as the head multiplies in no more time."""
    tokens, sequences = size
    return max(sequences, min(tokens, 64))


@dataclass
class PackedStep:
    """tokens, sequences, width (of the page table), logit_rows: sizes. requests: those that sample, generating ones first.

    sample_at: their rows of the logits, where these are not all. prompt_rows: (request, first prompt position, first row of the logits,
    rows) of the chunks whose logits are wanted for themselves.
    """

    tokens: int
    sequences: int
    width: int
    logit_rows: int
    max_q: int
    requests: list[Request]
    sample_at: list[int]
    prompt_rows: list[tuple[Request, int, int, int]]


class StepBuffers:
    """Room for `max_tokens` tokens of `max_batch` sequences with up to `max_pages` pages each.

    most_rows: tokens of a sequence that attention takes in one step; a longer chunk goes as several sequences over the same pages, which
    comes to the same, as all keys of a step are stored before any is read.
    guess_rows: sequences that guesses go as, one row each; 0: the guesses of a request are one sequence.
    All index arrays live in one int32 array, the page table last and dense at the step's width, so that a step is one copy of what it uses.
    """

    def __init__(
        self, *, max_tokens: int, max_batch: int, max_pages: int, page_size: int, pages: int, vocab: int, device: torch.device,
        most_rows: int | None = None, guess_rows: int = 0,
    ) -> None:  # fmt: skip
        self._most_rows, self._guess_rows = most_rows, guess_rows
        t, b = max_tokens, max(max_batch + (max_tokens // most_rows if most_rows else 0), guess_rows)
        sizes = {"ids": t, "positions": t, "slots": t, "q_starts": b + 1, "kv_lens": b, "seq_lens": b, "logit_rows": t}
        sizes |= {"rows": b, "sampled_rows": b, "page_table": b * max_pages}
        self._at, end = {}, 0
        for name, size in sizes.items():
            self._at[name] = end
            end += -(-size // 4) * 4  # each array starts at a multiple of 16 bytes
        cuda = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.int32, pin_memory=cuda)
        self._device = torch.zeros(end, dtype=torch.int32, device=device) if cuda else self._host
        self._copied = torch.cuda.Event() if cuda else None
        whole = self._host.numpy()
        self._arrays = {name: whole[self._at[name] : self._at[name] + size] for name, size in sizes.items()}
        self._page_size = page_size
        packed = {n: a for n, a in self._arrays.items() if n not in ("seq_lens", "rows", "sampled_rows")}
        self._packer = StepPacker(**packed, page_size=page_size, pages=pages, vocab=vocab)

    def pack(self, plan: Plan) -> PackedStep:
        """Fill the host array; the next `pack` overwrites it."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the last such step may still wait behind the step before it
        chunks = [*plan.drafts, *plan.chunks]
        ends = [r.next_position + 1 for r in plan.decodes] + [c.start + c.count for c in chunks]
        width = -(-max(ends) // self._page_size)
        packer, requests, sample_at, prompt_rows = self._packer, list(plan.decodes), list(range(len(plan.decodes))), []
        packer.begin(width)
        for r in plan.decodes:
            packer.add(_UNKNOWN, r.next_position, r.pages, 1)
        pieces = [p for c in plan.drafts for p in ([Chunk(c.request, c.start + i, 1) for i in range(c.count)] if self._guess_rows else [c])]
        for p in pieces:
            packer.add(p.request.tokens[p.start : p.start + p.count], p.start, p.request.pages, p.count)
        for c in plan.chunks:
            every = c.request.params.prompt_logprobs is not None
            if every and c.start < len(c.request.prompt_token_ids) - 1:
                prompt_rows.append((c.request, c.start, packer.rows, c.count))
            wanted = c.count if every else int(c.last)
            for start in range(c.start, c.start + c.count, self._most_rows or c.count):
                end = min(c.start + c.count, start + (self._most_rows or c.count))
                rows = min(max(wanted - (c.start + c.count - end), 0), end - start)
                packer.add(c.request.tokens[start:end], start, c.request.pages, rows)
                pieces.append(Chunk(c.request, start, end - start))
            if c.last:
                requests.append(c.request)
                sample_at.append(packer.rows - 1)
        b, n, decodes, a = packer.sequences, len(requests), len(plan.decodes), self._arrays
        a["ids"][:decodes] = -1
        known = [p.start + p.count if plan.drafts else p.request.target for p in pieces]
        a["seq_lens"][:b] = [*ends[:decodes], *known]
        a["rows"][:b] = [*(r.row for r in plan.decodes), *(p.request.row for p in pieces)]
        a["sampled_rows"][:n] = [r.row for r in requests]
        # 1 is a step of rows alone: another attention kernel, whose bits differ.
        max_q = 1 if plan.drafts and self._guess_rows else max([2, *(p.count for p in pieces)])
        return PackedStep(packer.tokens, b, width, packer.rows, max_q, requests, sample_at, prompt_rows)

    def batch(self, step: PackedStep, rows: Rows, caches: Mapping[int, KvCache]) -> Batch:
        """The packed step on the device, of just its size; its index arrays are views of one buffer."""
        t, b, width = step.tokens, step.sequences, step.width
        self._copy(self._at["page_table"] + b * width)
        return self._make(t, b, step.logit_rows, rows, caches, self._view("page_table", b * width).view(b, width), step.max_q)

    def pad(self, step: PackedStep, size: tuple[int, int]) -> None:
        """The packed step on the device, filled up to (tokens, sequences): what `padded_batch` of that size reads.

        Padding tokens belong to no sequence and are stored nowhere; padding sequences have neither tokens nor keys.
        """
        (t, b), a, r = size, self._arrays, step.logit_rows
        for name, value in (("ids", 0), ("positions", 0), ("slots", -1)):
            a[name][step.tokens : t] = value
        a["q_starts"][step.sequences + 1 : b + 1] = step.tokens
        for name, value in (("kv_lens", 0), ("seq_lens", 1), ("rows", 0)):
            a[name][step.sequences : b] = value
        a["logit_rows"][r : padded_rows(size)] = step.tokens - 1
        self._copy(self._at["page_table"])

    def padded_batch(self, size: tuple[int, int], rows: Rows, caches: Mapping[int, KvCache]) -> Batch:
        """A batch at fixed addresses, for a graph: page tables come from the rows, at their full width."""
        t, b = size
        return self._make(t, b, padded_rows(size), rows, caches, rows.tables(self._view("rows", b)), t)

    def _make(self, t: int, b: int, logit_rows: int, rows: Rows, caches: Mapping[int, KvCache], page_table: Tensor, max_q: int) -> Batch:
        ids, most = self._view("ids", t), min(t, b)
        known = ids[:most]  # a token of a generating request is on the device alone: -1 here; such a token's sequence has its number
        last = rows.token.index_select(0, self._view("rows", most))
        return Batch(
            ids=torch.cat([torch.where(known < 0, last, known), ids[most:]]), positions=self._view("positions", t),
            slots=self._view("slots", t), q_starts=self._view("q_starts", b + 1), kv_lens=self._view("kv_lens", b), page_table=page_table,
            caches=caches, logit_rows=self._view("logit_rows", logit_rows), seq_lens=self._view("seq_lens", b), max_q=max_q,
        )  # fmt: skip

    def sampled_rows(self, step: PackedStep) -> Tensor:
        return self._view("sampled_rows", len(step.requests)).long()

    def _copy(self, used: int) -> None:
        if self._copied is not None:
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device.device))

    def _view(self, name: str, size: int) -> torch.Tensor:
        return self._device[self._at[name] : self._at[name] + size]
