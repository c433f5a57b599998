"""Hypothesis strategies: sizes near the edges where kernels break, ragged batches around page edges, and schedules of an executor.

@given(shape=row_shapes(), dtype=dtypes(), seed=seeds())
@given(batch=ragged_batches())                    a generate.RaggedBatch: prefill chunks and decodes mixed, empty sequences included
@given(schedule=schedules(budget=16))             requests, and the steps in which their tokens go through
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from tests.support.generate import RaggedBatch, ragged_batch

HALVES = (torch.bfloat16, torch.float16)
PAGE_SIZES = (1, 16, 32, 64, 128)


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**31 - 1)


def dtypes(*among: torch.dtype) -> st.SearchStrategy[torch.dtype]:
    """One of `among`, by default bf16, fp16 and fp32."""
    return st.sampled_from(among or (*HALVES, torch.float32))


def near(edges: Sequence[int], *, low: int = 0, high: int | None = None) -> st.SearchStrategy[int]:
    """An edge, one less or one more, or anything from low to high (the largest edge + 1)."""
    top = max(edges) + 1 if high is None else high
    around = sorted({edge + d for edge in edges for d in (-1, 0, 1) if low <= edge + d <= top})
    return st.one_of(st.sampled_from(around), st.integers(low, top))


def row_shapes(max_rows: int = 65, max_width: int = 4104, multiple: int = 8, min_rows: int = 0) -> st.SearchStrategy[tuple[int, int]]:
    """(T, N): T near 0, 1 and powers of two, N a multiple near the sizes at which a row takes another warp or vector step."""
    rows = near([e for e in (0, 1, 2, 8, 32, 64) if e <= max_rows] or [0], low=min_rows, high=max_rows)
    top = max_width // multiple
    widths = near(sorted({min(top, max(1, e // multiple)) for e in (multiple, 64, 256, 1024, 2048, 4096)}), low=1, high=top)
    return st.tuples(rows, widths.map(lambda count: count * multiple))


def lengths(page_size: int, max_pages: int = 4, min_length: int = 0) -> st.SearchStrategy[int]:
    """Lengths of sequences: 0, 1, and around every page edge."""
    return near([0, 1, *(page * page_size for page in range(1, max_pages + 1))], low=min_length, high=max_pages * page_size)


@st.composite
def ragged_lengths(
    draw: st.DrawFn, page_size: int, max_sequences: int = 5, max_pages: int = 4, min_sequences: int = 0
) -> tuple[list[int], list[int]]:
    """(q_lens, kv_lens): decodes (1 of L), whole prompts (L of L), chunks, and sequences without new tokens or keys."""
    kv_lens = draw(st.lists(lengths(page_size, max_pages), min_size=min_sequences, max_size=max_sequences))
    q_lens = [draw(st.one_of(st.sampled_from(sorted({0, min(1, L), L})), st.integers(0, L))) for L in kv_lens]
    return q_lens, kv_lens


@st.composite
def ragged_batches(
    draw: st.DrawFn, page_sizes: Sequence[int] = PAGE_SIZES, max_sequences: int = 5, max_pages: int = 4, min_sequences: int = 0
) -> RaggedBatch:
    """Batches with random page tables, spare pages and tails of huge ids."""
    page_size = draw(st.sampled_from(list(page_sizes)))
    q_lens, kv_lens = draw(ragged_lengths(page_size, max_sequences, max_pages, min_sequences))
    spare_pages, spare_width = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    return ragged_batch(q_lens, kv_lens, page_size, spare_pages=spare_pages, spare_width=spare_width, seed=draw(seeds()))


@dataclass(frozen=True)
class Schedule:
    """What an executor may do with some requests.

    prompts, outputs: tokens of each request; steps: per step the (request, tokens) that go through it, a prompt's chunks first, then
    one token at a time for each output but the last (which is sampled and never fed back).
    """

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]


@st.composite
def schedules(draw: st.DrawFn, budget: int = 32, max_requests: int = 4, max_prompt: int = 70, max_output: int = 6) -> Schedule:
    """Steps of at most `budget` tokens in which every request runs to its end; arrival, chunks and order are drawn."""
    count = draw(st.integers(1, max_requests))
    prompts = tuple(draw(near([1, 16, 32, 64], low=1, high=max_prompt)) for _ in range(count))
    outputs = tuple(draw(st.integers(1, max_output)) for _ in range(count))
    prefill, decode = list(prompts), [n - 1 for n in outputs]
    steps: list[tuple[tuple[int, int], ...]] = []
    while any(prefill) or any(decode):
        waiting = [r for r in range(count) if prefill[r] or decode[r]]
        chosen = draw(st.lists(st.sampled_from(waiting), unique=True, min_size=1))
        step, left = [], budget
        for request in chosen:
            if not left:
                break
            whole = min(prefill[request], left)
            tokens = draw(st.sampled_from(sorted({1, whole}))) if prefill[request] else 1
            remaining = prefill if prefill[request] else decode
            remaining[request] -= tokens
            left -= tokens
            step.append((request, tokens))
        steps.append(tuple(step))
    return Schedule(prompts, outputs, tuple(steps))
