"""Inputs for tests: random normal tensors, poisoned memory, and ragged paged batches whose unused parts are poison.

Poison is what a kernel must not read or leave behind: NaN in floats, 2^31 - 1 in indices, 0xFF in bytes.

    x = normal(T, N, dtype=torch.bfloat16, device=device)           random normal, from torch's seed (conftest prints it) or `seed=`
    x, intact = padded_rows(x, gap=8)                               rows with a stride; intact() fails if the padding was written
    poison_allocator((T, N), dtype, device)                         the next tensor of that size starts as NaN (CUDA's caching allocator)
    batch = ragged_batch([1, 5, 0], [64, 5, 0], page_size=64)       q_starts, kv_lens, page_table (huge ids in its tail), slots, positions
    k, v = filled_pools(batch, K, D, dtype)                         random where the batch has keys, NaN in all other slots and pages
    keys = gather(k, batch, b)                                      [kv_len, K, D] of one sequence, for a reference

The tensors come from the CPU generator and are moved, so that a CPU and a CUDA test of one seed see the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

HUGE = 2**31 - 1
FP8 = torch.float8_e4m3fn
Device = torch.device | str


def generator(seed: int | None) -> torch.Generator | None:
    """A CPU generator of that seed; None is torch's own."""
    return None if seed is None else torch.Generator().manual_seed(seed)


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, device: Device = "cpu", scale: float = 1.0, seed: int | None = None
) -> torch.Tensor:
    """scale * N(0, 1), rounded to dtype (clamped to +-448 first for e4m3, whose conversion would give NaN)."""
    x = torch.randn(shape, generator=generator(seed)) * scale
    return (x.clamp(-448, 448) if dtype == FP8 else x).to(dtype).to(device)


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill in place: NaN, 2^31 - 1 (the largest value of narrower integers), or True. Returns x."""
    if x.dtype == FP8:
        x.view(torch.uint8).fill_(0x7F)
    elif x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype == torch.bool:
        x.fill_(True)
    else:
        x.fill_(min(HUGE, torch.iinfo(x.dtype).max))
    return x


def poisoned(*shape: int, dtype: torch.dtype, device: Device = "cpu") -> torch.Tensor:
    """A new tensor of poison."""
    return poison(torch.empty(shape, dtype=dtype, device=device))


def poison_allocator(shape: Sequence[int], dtype: torch.dtype, device: Device, copies: int = 4) -> None:
    """Leave `copies` freed blocks of NaN behind, so that an output of that size that an op allocates next starts as poison.

    An element that the op does not write then fails the comparison. On a CPU the allocator gives no such promise.
    """
    blocks = [poisoned(*shape, dtype=dtype, device=device) for _ in range(copies)]
    if blocks[0].is_cuda:
        torch.cuda.synchronize()
    del blocks


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.uint8)


def padded_rows(x: torch.Tensor, gap: int = 8, offset: int = 0) -> tuple[torch.Tensor, Callable[[], None]]:
    """x [T, N] as a view of a poisoned [T + 2, offset + N + gap] buffer, and a check that nothing but the view was written."""
    T, N = x.shape
    buffer = poisoned(T + 2, offset + N + gap, dtype=x.dtype, device=x.device)
    view = buffer[1 : T + 1, offset : offset + N]
    view.copy_(x)
    before = buffer.clone()

    def intact() -> None:
        now = buffer.clone()
        now[1 : T + 1, offset : offset + N] = before[1 : T + 1, offset : offset + N]
        if not torch.equal(_bytes(now), _bytes(before)):
            raise AssertionError("padding around the rows was written")

    return view, intact


@dataclass(frozen=True)
class RaggedBatch:
    """One ragged step: B sequences, each with n new tokens (a chunk of its prompt, or one) and L keys after the step.

    q_starts int32 [B + 1], kv_lens int32 [B], page_table int32 [B, W], and per token positions, slots int32 [T].
    slot = page * P + offset; entries of page_table past a sequence's last page are HUGE. Page 0 belongs to no sequence.
    """

    q_starts: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    pages: int
    page_size: int

    @property
    def T(self) -> int:
        return self.slots.numel()

    @property
    def B(self) -> int:
        return self.kv_lens.numel()

    def q_lens(self) -> list[int]:
        return self.q_starts.diff().tolist()

    def slots_of(self, b: int) -> torch.Tensor:
        """int64 [L]: the slot of each key of sequence b."""
        at = torch.arange(int(self.kv_lens[b]), device=self.page_table.device)
        return self.page_table[b].long()[at // self.page_size] * self.page_size + at % self.page_size

    def to(self, device: Device) -> RaggedBatch:
        names = ("q_starts", "kv_lens", "page_table", "positions", "slots")
        return RaggedBatch(*(getattr(self, name).to(device) for name in names), self.pages, self.page_size)


def ragged_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    page_size: int,
    *,
    spare_pages: int = 3,
    spare_width: int = 2,
    seed: int | None = None,
    device: Device = "cpu",
) -> RaggedBatch:
    """Sequences with q_lens[b] new tokens that end at kv_lens[b] keys, on distinct pages in random order among spare ones."""
    if len(q_lens) != len(kv_lens) or any(n > L for n, L in zip(q_lens, kv_lens, strict=True)):
        raise ValueError(f"ragged_batch: q_lens is {list(q_lens)}, expected one per sequence and at most kv_lens {list(kv_lens)}")
    need = [-(-L // page_size) for L in kv_lens]
    pages = 1 + sum(need) + spare_pages
    order = (1 + torch.randperm(pages - 1, generator=generator(seed))).int()
    table = torch.full((len(need), max(need, default=0) + spare_width), HUGE, dtype=torch.int32)
    taken = 0
    for b, count in enumerate(need):
        table[b, :count] = order[taken : taken + count]
        taken += count
    positions = [torch.arange(L - n, L, dtype=torch.int32) for n, L in zip(q_lens, kv_lens, strict=True)]
    slots = [table[b][at.long() // page_size] * page_size + at % page_size for b, at in enumerate(positions)]
    none = [torch.empty(0, dtype=torch.int32)]
    batch = RaggedBatch(
        q_starts=torch.tensor([0, *q_lens]).cumsum(0).int(),
        kv_lens=torch.tensor(list(kv_lens), dtype=torch.int32),
        page_table=table,
        positions=torch.cat(positions or none),
        slots=torch.cat(slots or none).int(),
        pages=pages,
        page_size=page_size,
    )
    return batch.to(device)


def empty_pool(batch: RaggedBatch, K: int, D: int, dtype: torch.dtype) -> torch.Tensor:
    """[pages, P, K, D] of poison, for ops that write the cache."""
    return poisoned(batch.pages, batch.page_size, K, D, dtype=dtype, device=batch.page_table.device)


def filled_pools(
    batch: RaggedBatch, K: int, D: int, dtype: torch.dtype, *, scale: float = 1.0, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V pools: random normal in every slot that holds a key of the batch, NaN in the tails of pages and in all other pages."""
    pools = []
    for offset in range(2):
        pool = empty_pool(batch, K, D, dtype)
        flat = pool.view(-1, K, D)
        for b in range(batch.B):
            at = batch.slots_of(b)
            own = None if seed is None else seed + 2 * b + offset
            flat[at] = normal(at.numel(), K, D, dtype=dtype, device=pool.device, scale=scale, seed=own)
        pools.append(pool)
    return pools[0], pools[1]


def gather(pool: torch.Tensor, batch: RaggedBatch, b: int) -> torch.Tensor:
    """[L, K, D]: the keys (or values) of sequence b in order."""
    return pool.view(-1, *pool.shape[2:])[batch.slots_of(b)]
