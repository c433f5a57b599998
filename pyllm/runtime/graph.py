"""CUDA graphs of steps, one per size: a step of a small model is a few hundred kernels of a few microseconds, which Python
cannot launch as fast as the GPU runs them. Replayed, they cost one launch.

Everything a step reads lives in tensors that stay where they are (`Rows`, `StepBuffers`, the KV pool, the weights), so lengths, pages and
tokens may change between replays. A decode step with fewer rows than the graph runs idle rows, which touch the dummy page alone; a step
with prompts is filled up with tokens that are stored nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyllm.ops.attention import attention_kernel
from pyllm.plan.pages import SlotSizes, Stored
from pyllm.progress import progress_bar

MAX_SIZE = 1024  # larger steps take long enough for Python to stay ahead, but for those of a full chunk, which come in a row
FEW = 8  # sequences of the mixed steps whose time matters most: a prompt or two, and little else


def graph_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then steps that pad by at most an eighth or so of the rows: 8 to 256 by 8, to 512 by 16, to 1024 by 32."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, MAX_SIZE + 1, 32)]
    top = min(max_batch, MAX_SIZE)
    return [s for s in sizes if s < top] + [top]


def token_sizes(
    most: int, chunk: int, slots: Mapping[int, SlotSizes], dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int
) -> list[int]:
    """Of steps with prompts: to 1024 tokens, which take a GPU about as long as Python needs to launch the kernels of 32 layers (14 ms on an
    H200's host), and a full chunk. None where attention is a torch composition: it reads whole page tables, and a graph has them at full
    width."""
    if any(attention_kernel(dtype, kv_dtype, s.head_dim, page_size, most, True) != "paged_attention" for s in slots.values()):
        return []
    sizes = [8, 16, 32, 64, 128, *range(256, 512, 64), *range(512, MAX_SIZE + 1, 128)]
    return [s for s in sizes if s <= most] + [chunk] * (chunk > MAX_SIZE)


def step_sizes(
    decode: Sequence[int] | None, mixed: Sequence[int] | None, cuda: bool, max_batch: int, most: int, chunk: int, stored: Stored,
    dtype: torch.dtype, page_size: int,
) -> tuple[Sequence[int], Sequence[int]]:  # fmt: skip
    """Of decodes, and of steps with prompts if decodes are captured at all, where they are not given. most: tokens of a step."""
    if not cuda:
        return decode or (), mixed or ()
    decode = graph_sizes(max_batch) if decode is None else decode
    if mixed is None:
        each = [token_sizes(most, chunk, s.kv_slots(), dtype, kind, page_size) for s, kind in stored]
        mixed = min(each, key=len) if decode else []
    return decode, mixed


def mixed_shapes(tokens: Sequence[int], max_batch: int) -> list[tuple[int, int]]:
    """(tokens, sequences) of the steps with prompts that are captured, the least first. In large ones there are as many rows of logits as
    sequences, and 1024 of them with 128k tokens take an H200 1.7 ms: hence three sizes."""
    few, many = (FEW, max_batch), (-(-max_batch // 4), -(-max_batch // 2), max_batch)
    return sorted({(t, min(t, b, max_batch)) for t in tokens for b in (few if t <= MAX_SIZE else many)})


def wasteful(tokens: int, size: int) -> bool:
    """Padding a step of so many tokens to this size costs more than Python's launches: small steps take about as long as reading the
    weights, in large ones every token counts."""
    return size > MAX_SIZE and 16 * (size - tokens) > size


class Graphs:
    """`run(kind, size)`: the output of `kinds[kind](size)`, through a graph where one was captured."""

    def __init__(self, kinds: dict[str, Callable[[Any], Tensor]], device: torch.device) -> None:
        self._kinds, self._device = kinds, device
        self._graphs: dict[tuple[str, Any], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._logits: Tensor | None = None

    def capture(self, wanted: Sequence[tuple[str, Any]], progress: bool) -> None:
        """Capture these kinds and sizes: the largest first, so that the smaller ones find room in the memory it left."""
        pool = torch.cuda.graph_pool_handle()
        with progress_bar("capturing CUDA graphs", len(wanted), "graphs", progress) as advance, torch.inference_mode():
            stream = torch.cuda.Stream(self._device)
            for kind, n in wanted:
                step = self._kinds[kind]
                stream.wait_stream(torch.cuda.current_stream(self._device))
                with torch.cuda.stream(stream):
                    self._make_room(step(n))  # a call before: what is set up by the first one must not be captured
                torch.cuda.current_stream(self._device).wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    out = self._keep(step(n))
                self._graphs[kind, n] = graph, out
                advance()
        torch.cuda.synchronize(self._device)

    def _make_room(self, out: Tensor) -> None:
        if out.dim() == 2 and (self._logits is None or len(self._logits) < len(out)):
            self._logits = torch.empty_like(out, memory_format=torch.contiguous_format)

    def _keep(self, out: Tensor) -> Tensor:
        """All graphs give their logits in one place: kept apart they would take a GB (256 rows, 128k tokens, 35 sizes)."""
        if out.dim() != 2:
            return out
        assert self._logits is not None
        return self._logits[: len(out)].copy_(out)

    def run(self, kind: str, n: Any) -> Tensor:
        found = self._graphs.get((kind, n))
        if found is None:
            return self._kinds[kind](n)
        found[0].replay()
        return found[1]
