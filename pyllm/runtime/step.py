"""The buffers of a step: one host array that the packer fills, one copy to the device, one `Batch` of views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pyllm.runtime.batch import Batch, KvCache
from pyllm.runtime.host import StepPacker
from pyllm.runtime.schedule import Work


class StepBuffers:
    """Room for `max_tokens` tokens of `max_batch` sequences with up to `max_pages` pages each.

    All index arrays live in one int32 array, the page table last and dense at the step's width, so that a step is one copy of what it uses.
    """

    def __init__(
        self, *, max_tokens: int, max_batch: int, max_pages: int, page_size: int, pages: int, vocab: int, device: torch.device
    ) -> None:
        t, b = max_tokens, max_batch
        sizes = {"ids": t, "positions": t, "slots": t, "q_starts": b + 1, "kv_lens": b, "seq_lens": b, "logit_rows": b}
        sizes["page_table"] = b * max_pages
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
        self._page_size, self._seq_lens = page_size, arrays.pop("seq_lens")
        self._packer = StepPacker(**arrays, page_size=page_size, pages=pages, vocab=vocab)

    def pack(self, work: Sequence[Work], caches: Mapping[int, KvCache]) -> Batch:
        """The step's Batch, as views of these buffers: the next `pack` overwrites them, in the order of the stream on a GPU."""
        width = max(-(-(w.start + w.count) // self._page_size) for w in work)
        if self._copied is not None:
            self._copied.synchronize()  # a step that samples nothing ends before its copy has read the host array
        self._packer.begin(width)
        for i, w in enumerate(work):
            self._seq_lens[i] = w.request.length
            self._packer.add(w.request.tokens[w.start : w.start + w.count], w.start, w.request.pages, w.wants_logits)
        t, b, r = self._packer.tokens, self._packer.sequences, self._packer.rows
        if self._copied is not None:
            used = self._at["page_table"] + b * width
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self._device.device))
        return Batch(
            ids=self._view("ids", t),
            positions=self._view("positions", t),
            slots=self._view("slots", t),
            q_starts=self._view("q_starts", b + 1),
            kv_lens=self._view("kv_lens", b),
            page_table=self._view("page_table", b * width).view(b, width),
            caches=caches,
            logit_rows=self._view("logit_rows", r),
            seq_lens=self._view("seq_lens", b),
            max_q=max(w.count for w in work),
        )

    def _view(self, name: str, size: int) -> torch.Tensor:
        return self._device[self._at[name] : self._at[name] + size]
