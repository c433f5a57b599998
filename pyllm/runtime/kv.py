"""The paged KV pool: for each KV slot of a model, pages of keys and values.

Letters: P page size, K KV heads, D head dim. Page 0 is the dummy page (see `BlockPool`): it exists in the tensors and belongs to nobody.
The pages start uninitialised: every op reads only the first kv_len keys of a sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyllm.plan.pages import ONE_BYTE, SlotSizes, free_bytes, page_bytes, show_bytes
from pyllm.runtime.batch import KvCache

if TYPE_CHECKING:
    from pyllm.runtime.offload import Move
    from pyllm.runtime.windows import WindowPages


class KvPool:
    """`caches[slot]`: a `KvCache` with k, v `[pages, P, K, D]`; of a slot whose window is in `windows`, with as many pages as that has.

    scales: for an FP8 or int8 cache, slot -> (k_scale, v_scale), dequantisation scales fp32 `[1]` or `[K]`; slots left out have scale 1.
    Errors: a size that is not allowed (ValueError), more bytes than the device has free (MemoryError).
    """

    def __init__(
        self, slots: Mapping[int, SlotSizes], pages: int, page_size: int = 64, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu", scales: Mapping[int, tuple[Tensor, Tensor]] | None = None,
        windows: Mapping[int, WindowPages] | None = None,
    ) -> None:  # fmt: skip
        each = {number: page_bytes({number: slot}, page_size, dtype) for number, slot in slots.items()}
        self.device, self._windows = torch.device(device), windows or {}
        if pages < 2:
            raise ValueError(f"KvPool: pages is {pages}, expected at least 2 (page 0 is the dummy page)")
        if pages * page_size > 2**31 - 1:
            raise ValueError(f"KvPool: {pages} pages of {page_size} tokens are beyond the int32 slots of a batch")
        self.pages, self.page_size, self.dtype = pages, page_size, dtype
        self.bytes = sum(size * self._places(slots[number]) for number, size in each.items())
        free = free_bytes(self.device)
        if self.bytes > free:
            raise MemoryError(
                f"KvPool: {pages} pages of {page_size} tokens take {show_bytes(self.bytes)}, {show_bytes(free)} are free on {self.device}"
            )
        unknown = sorted(set(scales or {}) - set(slots))
        if unknown:
            raise ValueError(f"KvPool: scales has slot {unknown[0]}, expected some of {', '.join(map(str, slots))}")
        self.caches = {number: self._cache(number, slot, dict(scales or {})) for number, slot in slots.items()}
        self._host: list[Tensor] = []
        for cache in self.caches.values():  # idle rows of a step read and write the dummy page: finite there, whatever was in memory
            cache.k[0].zero_()
            cache.v[0].zero_()

    def add_host(self, pages: int) -> None:
        """So many pages in the host's memory, pinned: what `move` saves to and loads from."""
        pinned = self.device.type == "cuda"
        self._host = [torch.empty(pages, *t.shape[1:], dtype=t.dtype, pin_memory=pinned) for t in self._tensors()]

    def move(self, moves: Sequence[Move]) -> None:
        """Copy whole pages of all caches, as told and in that order, without waiting for it."""
        device = self._tensors()
        tiers = {"copy": (device, device), "save": (device, self._host), "load": (self._host, device)}
        for kind, some in itertools.groupby(moves, key=lambda move: move[0]):
            pairs = [(source, target) for _, source, target in some]
            sources, targets = tiers[kind]
            new = [t[source] for t in sources for source, _ in pairs]
            torch._foreach_copy_([t[target] for t in targets for _, target in pairs], new, non_blocking=True)

    def _tensors(self) -> list[Tensor]:
        each = [t for cache in self.caches.values() for t in (cache.k, cache.v)]
        return [t.view(torch.uint8) for t in each] if self.dtype in ONE_BYTE else each

    def _places(self, slot: SlotSizes) -> int:
        small = self._windows.get(slot.window or 0)
        return self.pages if small is None else small.total + 1

    def _cache(self, number: int, slot: SlotSizes, scales: dict[int, tuple[Tensor, Tensor]]) -> KvCache:
        shape = (self._places(slot), self.page_size, slot.kv_heads, slot.head_dim)
        k, v = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        small = self._windows.get(slot.window or 0)
        where = None if small is None else small.map
        if self.dtype not in ONE_BYTE:
            if number in scales:
                raise ValueError(f"KvPool: slot {number} has scales, but the cache is {self.dtype}, not float8_e4m3fn or int8")
            return KvCache(k, v, pages=where)
        one = torch.ones(1, dtype=torch.float32, device=self.device)
        k_scale, v_scale = (self._scale(number, slot, s) for s in scales.get(number, (one, one)))
        return KvCache(k, v, k_scale, v_scale, where)

    def _scale(self, number: int, slot: SlotSizes, scale: Tensor) -> Tensor:
        if scale.dtype != torch.float32 or scale.dim() != 1 or scale.numel() not in (1, slot.kv_heads):
            raise ValueError(
                f"KvPool: a scale of slot {number} is {scale.dtype} {list(scale.shape)}, expected float32 [1] or [{slot.kv_heads}]"
            )
        return scale.to(self.device)
