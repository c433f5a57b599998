"""Where the memory goes: measured once a model is loaded, or planned from its declaration before anything is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pyllm.plan.pages import cache_bytes, count_pages, show_bytes, window_needs
from pyllm.runtime.batch import Batch
from pyllm.runtime.graph import MAX_SIZE
from pyllm.runtime.kv import KvPool

if TYPE_CHECKING:
    from pyllm.api.model import Parts
    from pyllm.layers import Decoder
    from pyllm.layers.formats import QuantPlan

OVERHEAD = 1 << 30  # CUDA context, libraries' workspaces and captured graphs; about 0.9 GiB on an H200


def weight_bytes(spec: Decoder, dtype: torch.dtype, quant: QuantPlan = ()) -> int:
    """Bytes of the bound weights; vectors (norms, biases) are counted in fp32."""
    from pyllm.layers import Dense
    from pyllm.layers.formats import resolve
    from pyllm.layers.linear import Linear
    from pyllm.layers.spec import walk

    total = 0
    for path, node in walk(spec):
        tensors = {name: (math.prod(w.local_shape(1, path)), w.cols is None) for name, w in node.weights().items()}
        if isinstance(node, Linear) and (kind := resolve(node.names(path), quant)) != Dense():
            tensors.pop("weight")
            total += max(node.experts, 1) * kind.weight_bytes(sum(p.size for p in node.parts), node.d)
        total += sum(count * (4 if vector else dtype.itemsize) for count, vector in tensors.values())
    return total


def activation_bytes(parts: Parts, tokens: int, max_batch: int, page_size: int) -> int:
    """Peak memory of the largest step beside weights and cache, measured by running it on a cache of two pages."""
    device, width = parts.device, min(page_size, parts.spec.max_positions)
    kv = KvPool(parts.spec.kv_slots(), 2, page_size, parts.dtype, device)
    sequences, total = -(-tokens // width), tokens + max_batch
    at = torch.arange(total, dtype=torch.int32, device=device)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device) * width
    starts[-1] = tokens
    batch = Batch(
        ids=torch.zeros_like(at),
        positions=at % width,
        slots=torch.full_like(at, -1),
        q_starts=torch.cat([starts, tokens + 1 + at[:max_batch]]),
        kv_lens=torch.cat([starts.diff(), torch.ones_like(at[:max_batch])]),
        page_table=torch.zeros(sequences + max_batch, 1, dtype=torch.int32, device=device),
        caches=kv.caches,
        logit_rows=at[-max_batch:],
        max_q=width,
    )
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        parts.module(batch)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, before anything is loaded. activations: an estimate, of the widest step between two layers and of its logits.

    kv: of the cache, `windows` of it for layers that keep the last tokens of each request alone; the others take kv_token bytes for each of
    `tokens`, which is 0 where nothing fits. enough: these are all that max_batch requests can have.
    """

    total: int
    weights: int
    activations: int
    overhead: int
    kv: int
    windows: int
    kv_token: int
    tokens: int
    enough: bool

    def __str__(self) -> str:
        rows = [("weights", self.weights), ("activations", self.activations), ("overhead", self.overhead), ("KV cache", self.kv)]
        if self.windows:
            rows.append(("  windows", self.windows))
        lines = [f"{name:<12} {show_bytes(size):>12}  {size / self.total:6.1%}" for name, size in rows]
        each = f" of {self.kv_token / 1024:.4g} KiB each" if self.kv_token else ""
        room = f"{self.tokens:,} tokens{each}{', all that the requests can have' * self.enough}" if self.tokens else "does not fit"
        return "\n".join([f"{'memory':<12} {show_bytes(self.total):>12}", *lines, f"{'KV room':<12} {room}"])


def memory_plan(
    spec: Decoder,
    total: int,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    tokens: int,
    max_batch: int,
    fraction: float,
    quant: QuantPlan = (),
    page_size: int = 64,
    max_length: int | None = None,
) -> MemoryPlan:
    """What `LLM` would do with `total` bytes of free memory, with steps of `tokens` prompt tokens and `max_batch` requests of max_length
    tokens (None: the model's context)."""
    from pyllm.layers import plan

    widest = max((i.shape[-2] for i in plan(spec) if len(i.shape) >= 2 and i.shape[-2] != spec.vocab_size), default=0)
    step = tokens + max_batch
    activations = step * (widest + widest // 2 + 3 * spec.embed.d) * dtype.itemsize + max_batch * spec.vocab_size * (dtype.itemsize + 4)
    activations *= 1 + (tokens > MAX_SIZE)  # the graph of a full step has memory of its own, beside what steps without one use
    weights = weight_bytes(spec, dtype, quant)
    room = int(max(total - weights - activations - OVERHEAD, 0) * fraction)
    slots = spec.kv_slots()
    most = max_batch * -(-(max_length or spec.max_positions) // page_size) * page_size
    pages = count_pages(most, page_size, max_batch, step, [(spec, kv_dtype)], room)
    kept, windows = cache_bytes(slots, page_size, kv_dtype, pages, window_needs(slots, page_size, max_batch, step, pages))
    fits = kept + windows <= room
    stored = (pages - 1) * page_size * fits
    each = kept // (pages * page_size)
    return MemoryPlan(total, weights, activations, OVERHEAD, (kept + windows) * fits, windows * fits, each, stored, stored >= most)
