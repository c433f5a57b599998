"""Guesses of what comes next: from the request's own text, or from a second, smaller model.

A step then runs the last token and the guesses in one go, and keeps those guesses that are what the model itself chooses: greedy output is
what it is without guessing, up to the rounding of a step of more rows. Sources: Saxena, "Prompt Lookup Decoding" (2023); Leviathan et al.,
"Fast Inference from Transformers via Speculative Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyllm.ops.rows import advance_rows
from pyllm.ops.sampling import sample_tokens
from pyllm.runtime.batch import Batch, KvCache
from pyllm.runtime.request import Request

Module = Callable[[Batch], Tensor]
Propose = Callable[[Sequence[Request]], Sequence[NDArray[np.int32]]]
"""Guesses for each of some generating requests: all of a step's, and the host knows all their tokens."""


def by_lookup(most: int, longest: int) -> Propose:
    """Guess that what followed the last tokens before follows them again. Costs no model; pays where text repeats its prompt."""
    return lambda requests: [prompt_lookup(r.sync_tokens()[: r.length], most, longest) for r in requests]


class DraftModel:
    """A second model over the same pages: what the first one has in its cache, it has in its own, so a page table serves both."""

    def __init__(self, module: Module, caches: Mapping[int, KvCache], page_size: int, max_length: int, most: int) -> None:
        self._module, self._caches, self._page = module, caches, page_size
        self._last, self._most = max_length - 1, most

    def beside(self, target: Module) -> Module:
        """`target`, and whatever it stores is stored here too."""

        def run(b: Batch) -> Tensor:
            none = torch.empty(0, dtype=torch.int32, device=b.ids.device)
            self._module(replace(b, caches=self._caches, logit_rows=none, _rope={}, _paged={}))
            return target(b)

        return run

    def guess(self, b: Batch) -> Tensor:
        """`[most * B]` int32: the greedy tokens of so many steps after the decode step b, which stays as it is.

        A row that goes past its pages goes on in the dummy page, and one at the last position stays there: those guesses are never used.
        """
        token, position, kv_len, slots = (t.clone() for t in (b.ids, b.positions, b.kv_lens, b.slots))
        out = []
        for step in range(self._most):
            rows = replace(b, ids=token, positions=position, kv_lens=kv_len, slots=slots, caches=self._caches, _rope={}, _paged={})
            out.append(sample_tokens(self._module(rows)))
            if step + 1 < self._most:
                active = (position < self._last).to(torch.int32)
                advance_rows(out[-1], token, position, kv_len, slots, active, b.page_table, self._page)
        return torch.cat(out).clamp_min(0)


def prompt_lookup(tokens: NDArray[np.int32], most: int, longest: int) -> NDArray[np.int32]:
    """At most `most` tokens that followed the latest earlier place where the last n tokens stand, for the largest n <= `longest`."""
    length = len(tokens)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) if most > 0 else np.empty(0, np.int64)  # where a place may end
    best = ends
    for back in range(1, min(longest, length - 1)):
        ends = ends[ends >= back]
        ends = ends[tokens[ends - back] == tokens[length - 1 - back]]
        if not len(ends):
            break
        best = ends
    if not len(best):
        return tokens[:0]
    return tokens[best[-1] + 1 : best[-1] + 1 + most]


def accepted(drafted: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The tokens a step gives: chosen[i] follows drafted[:i], so it counts for as long as all guesses before it were right."""
    n = 0
    while n < len(drafted) and drafted[n] == chosen[n]:
        n += 1
    return list(chosen[: n + 1])
