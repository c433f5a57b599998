"""How many pages a cache may have: bytes of a page over the layers, places that layers with a window need, what fits in the memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

PAGE_SIZES = (16, 32, 64, 128)
ONE_BYTE = (torch.float8_e4m3fn, torch.int8)
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *ONE_BYTE)

Stored = Sequence[tuple[Any, torch.dtype]]
"""Declarations and the dtype of their caches, the model's own first, behind it the draft model's."""


class SlotSizes(Protocol):
    """What the pool needs to know of a KV slot (`pyllm.layers.KvSlot`)."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def window(self) -> int | None: ...


def page_bytes(slots: Mapping[int, SlotSizes], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all slots, keys and values."""
    if page_size not in PAGE_SIZES:
        raise ValueError(f"KvPool: page_size is {page_size}, expected one of {', '.join(map(str, PAGE_SIZES))}")
    if dtype not in KV_DTYPES:
        raise ValueError(f"KvPool: dtype is {dtype}, expected one of {', '.join(str(d).removeprefix('torch.') for d in KV_DTYPES)}")
    return sum(2 * page_size * s.kv_heads * s.head_dim * dtype.itemsize for s in slots.values())


def free_bytes(device: torch.device) -> int:
    """Memory that an allocation on the device can still get."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
        return kib * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def show_bytes(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"


def window_needs(slots: Mapping[int, SlotSizes], page_size: int, max_batch: int, step: int, pages: int) -> dict[int, int]:
    """window -> places, the dummy page included, for those windows that need fewer than `pages`.

    With c tokens in a step a request holds what c + window - 1 tokens touch: (window + c) / P + 2 pages at most, and all c are `step` at
    most. So no request ever finds none.
    """
    needs = {w: 1 + max_batch * (-(-w // page_size) + 2) + -(-step // page_size) for s in slots.values() if (w := s.window)}
    return {w: n for w, n in needs.items() if n < pages}


def cache_bytes(slots: Mapping[int, SlotSizes], page_size: int, dtype: torch.dtype, pages: int, few: Mapping[int, int]) -> tuple[int, int]:
    """Bytes of the caches that have all `pages`, and of those that have the places of their window in `few`, at most all."""
    kept = placed = 0
    for number, slot in slots.items():
        each = page_bytes({number: slot}, page_size, dtype)
        places = min(pages, few.get(slot.window or 0, pages))
        kept, placed = (kept + each * pages, placed) if places == pages else (kept, placed + each * places)
    return kept, placed


def pages_within(
    slots: Mapping[int, SlotSizes], page_size: int, dtype: torch.dtype, max_batch: int, step: int, room: int, extra: int
) -> int:
    """The most pages whose keys and values, and `extra` bytes for each, fit in `room` bytes; at least 2."""
    few = window_needs(slots, page_size, max_batch, step, 2**31)
    low, high = 2, (2**31 - 1) // page_size
    while low < high:
        middle = (low + high + 1) // 2
        need = extra * middle + sum(cache_bytes(slots, page_size, dtype, middle, few))
        low, high = (middle, high) if need <= room else (low, middle - 1)
    return low


def count_pages(tokens: int, page_size: int, max_batch: int, step: int, stored: Stored, room: int | None) -> int:
    """Pages for so many tokens and the dummy page, at most what `room` bytes hold."""
    wanted = -(-tokens // page_size) + 1
    if room is None:
        return wanted
    (spec, kind), *others = stored
    extra = sum(page_bytes(s.kv_slots(), page_size, t) for s, t in others)
    return min(wanted, pages_within(spec.kv_slots(), page_size, kind, max_batch, step, room, extra))
