"""The CPU's deterministic mode: each sequence of a step is a call of the model by itself.

A CPU's matrix product has other bits for other numbers of rows, so what a sequence gets would depend on its company. On a GPU there are
kernels without that (`pyllm.ops.invariant`), and a step stays one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pyllm.runtime.batch import Batch


def apart(module: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """`module`, called once for each sequence, in their order: one may read the keys that another of this step has stored."""

    def run(b: Batch) -> Tensor:
        starts = b.q_starts.tolist()
        wanted = torch.arange(starts[-1], dtype=torch.int32) if b.logit_rows is None else b.logit_rows
        ends = enumerate(itertools.pairwise(starts))
        return torch.cat([module(_one(b, i, first, end, wanted)) for i, (first, end) in ends if first < end])

    return run


def _one(b: Batch, i: int, first: int, end: int, wanted: Tensor) -> Batch:
    mine = wanted[(wanted >= first) & (wanted < end)] - first
    return replace(
        b,
        ids=b.ids[first:end],
        positions=b.positions[first:end],
        slots=b.slots[first:end],
        q_starts=torch.tensor([0, end - first], dtype=torch.int32),
        kv_lens=b.kv_lens[i : i + 1],
        page_table=b.page_table[i : i + 1],
        logit_rows=mine,
        seq_lens=None if b.seq_lens is None else b.seq_lens[i : i + 1],
        max_q=end - first,
        _rope={},
        _paged={},
    )
