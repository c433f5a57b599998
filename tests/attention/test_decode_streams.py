"""decode_attention with so many segments that each warp is a worker of its own: TMA boxes of pages, borders of the runs, what lies beside a
sequence in its boxes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import ops
from tests.attention.decode_cases import BF16, FP8, FP16, OPTIONS, S8, call, compare, make, scales_of, sinks_of
from tests.support.compare import assert_same
from tests.support.generate import RaggedBatch, normal, poison_allocator

pytestmark = pytest.mark.gpu
COUNT = 244  # sequences of 4 KV heads: 976 segments


def lengths_of(most: int) -> list[int]:
    """All remainders of a step and of a box, none at all, and one sequence that many workers share."""
    return [(b * 37) % most for b in range(COUNT - 1)] + [4001]


def check(batch: RaggedBatch, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    poison_allocator(q.shape, q.dtype, "cuda")
    got = call(batch, q, k, v, **options)
    compare(got, batch, q, k, v, **options)
    for one, two in zip(got, call(batch, q, k, v, **options), strict=True):
        assert_same(one, two, "two runs")


@pytest.mark.parametrize("P", [16, 32, 64, 128])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("dtype", "cache"), [(BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, S8)])
def test_pages(dtype: torch.dtype, cache: torch.dtype, D: int, P: int) -> None:
    batch, q, k, v = make([1] * COUNT, lengths_of(311), 8, 4, D, P, dtype, cache, spare=2)
    check(batch, q, k, v, **scales_of(cache, 4))


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("P", [16, 64])
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str, P: int, cache: torch.dtype) -> None:
    options = sinks_of(OPTIONS[case], 12) | scales_of(cache, 4)
    batch, q, k, v = make([1] * COUNT, lengths_of(400), 12, 4, 128, P, BF16, cache)
    check(batch, q, k, v, **options)


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize(("H", "K", "count"), [(8, 1, 930), (6, 3, 320), (10, 5, 190), (32, 32, 40), (64, 8, 120)])
def test_heads(H: int, K: int, count: int, cache: torch.dtype) -> None:
    """Warps side by side in a CTA, across CTAs, and (5 heads) some left over."""
    batch, q, k, v = make([1] * count, [1 + 41 * b % 230 for b in range(count)], H, K, 128, 32, BF16, cache)
    check(batch, q, k, v, **scales_of(cache, K))


@pytest.mark.parametrize("cache", [BF16, FP8])
def test_long_runs_of_empty_sequences(cache: torch.dtype) -> None:
    """More of them than a warp holds in its registers, between sequences of a single step and of several."""
    lengths = [(70 if b % 3 else 5) if b % 97 < 37 else 0 for b in range(300)]
    batch, q, k, v = make([1] * 300, lengths, 8, 4, 128, 32, BF16, cache)
    check(batch, q, k, v, **scales_of(cache, 4))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 128, 200])
@pytest.mark.parametrize("count", [236, 528, 1100])
def test_equal_lengths(count: int, length: int) -> None:
    """Segments stay whole where that leaves few warps without work."""
    batch, q, k, v = make([1] * count, [length] * count, 4, 4, 64, 32, BF16, FP8)
    check(batch, q, k, v, **scales_of(FP8, 4))


# H, K, sequences, keys at most. Heads in numbers that divide the warps or not; all warps have several segments.
MANY = [
    (32, 32, 260, 110),
    (64, 8, 480, 400),
    (64, 16, 230, 500),
    (4, 4, 620, 300),
    (24, 12, 200, 260),
    (6, 2, 980, 200),
    (12, 3, 700, 230),
]


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize(("H", "K", "count", "most"), MANY)
def test_several_segments_to_a_warp(H: int, K: int, count: int, most: int, cache: torch.dtype) -> None:
    batch, q, k, v = make([1] * count, [(b * 37) % most for b in range(count)], H, K, 64 if K > 4 else 128, 32, BF16, cache, spare=1)
    check(batch, q, k, v, **scales_of(cache, K))


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_several_segments_to_a_warp(case: str, cache: torch.dtype) -> None:
    options = sinks_of(OPTIONS[case], 64) | scales_of(cache, 32)
    batch, q, k, v = make([1] * 130, [300 + 11 * b % 230 for b in range(130)], 64, 32, 128, 64, BF16, cache)
    check(batch, q, k, v, **options)


@pytest.mark.parametrize("most", [100, 500])
def test_sequences_of_several_rows_and_of_none(most: int) -> None:
    """Of more rows than max_q, whose rows stay as they are, and with different numbers of chunks."""
    count, rows = 270, [(1, 3, 0, 2, 5, 1)[b % 6] for b in range(270)]
    lengths = [0 if b % 7 == 5 else 6 + 29 * b % most for b in range(count)]
    batch, q, k, v = make(rows, lengths, 128, 32, 64, 16, BF16, FP8)
    got = call(batch, q, k, v, max_q=4)
    mine = torch.repeat_interleave(torch.tensor(batch.q_lens()) <= 4, torch.tensor(batch.q_lens()))
    compare((got[0][mine.cuda()], got[1][mine.cuda()]), *without_long(batch, q, 4), k, v)


def without_long(batch: RaggedBatch, q: Tensor, most: int) -> tuple[RaggedBatch, Tensor]:
    """The same batch with no rows for sequences of more than `most`."""
    lens = torch.tensor(batch.q_lens())
    kept = torch.where(lens <= most, lens, 0)
    rows = torch.repeat_interleave(lens <= most, lens)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)]).int()
    now = RaggedBatch(starts, batch.kv_lens, batch.page_table, batch.positions[rows], batch.slots[rows], batch.pages, batch.page_size)
    return now, q[rows]


@pytest.mark.parametrize(("count", "most"), [(260, 110), (120, 400)])
def test_bits_beside_another_kernel(count: int, most: int) -> None:
    """It holds some of the SMs for some of the time, so that warps which wait for a part meet others that are late."""
    batch, q, k, v = make([1] * count, [(b * 37) % most for b in range(count)], 32, 32, 128, 64, BF16, FP8)
    at = batch.to("cuda")
    args = (q.cuda(), k.cuda(), v.cuda(), at.page_table, at.q_starts, at.kv_lens)
    want = ops.decode_attention(*args, scale=0.1)
    beside, a = torch.cuda.Stream(), torch.zeros(1024, 1024, device="cuda")
    torch.cuda.synchronize()
    for i in range(40):
        with torch.cuda.stream(beside):
            for _ in range(i % 4):
                torch.mm(a[: 128 * (1 + i % 8)], a)
        for got, expected in zip(ops.decode_attention(*args, scale=0.1), want, strict=True):
            assert_same(got, expected, f"run {i}")


@pytest.mark.parametrize("cache", [BF16, FP8])
def test_pages_between_those_of_others(cache: torch.dtype) -> None:
    """K and V interleaved page by page, q as a slice of qkv."""
    batch, q, k, v = make([1] * COUNT, lengths_of(150), 8, 4, 128, 16, BF16, cache)
    both = torch.stack([k, v], 1).cuda()
    wide = torch.full((q.shape[0], 14, 128), float("nan"), dtype=BF16, device="cuda")
    wide[:, 3:11] = q.cuda()
    at = batch.to("cuda")
    got = ops.decode_attention(wide[:, 3:11], both[:, 0], both[:, 1], at.page_table, at.q_starts, at.kv_lens, scale=128**-0.5)
    compare(got, batch, q, k, v)


def test_one_page_for_all() -> None:
    """A pool that repeats one page at a stride of 0, which no tensor map describes."""
    batch, q, k, v = make([1] * COUNT, [16] * COUNT, 8, 4, 128, 16)
    k, v = k[:1].nan_to_num().expand(COUNT, -1, -1, -1), v[:1].nan_to_num().expand(COUNT, -1, -1, -1)
    at = batch.to("cuda")
    pools = [x[:1].cuda().expand(COUNT, -1, -1, -1) for x in (k, v)]
    got = ops.decode_attention(q.cuda(), *pools, at.page_table % COUNT, at.q_starts, at.kv_lens, scale=0.1)
    now = RaggedBatch(batch.q_starts, batch.kv_lens, batch.page_table % COUNT, batch.positions, batch.slots, COUNT, 16)
    compare(got, now, q, k.contiguous(), v.contiguous(), scale=0.1)


@pytest.mark.parametrize(("H", "K", "count"), [(8, 4, COUNT), (32, 32, 150)])
def test_graph_replay_with_changed_lengths(H: int, K: int, count: int) -> None:
    """The parts that one replay leaves for others are not taken for those of the next."""
    batch, q, k, v = make([1] * count, [300] * count, H, K, 128, 32, BF16, FP8)
    pools = [x.float().nan_to_num().to(FP8).cuda() for x in (k, v)]
    static = [q.cuda(), *pools, *(x.cuda() for x in (batch.page_table, batch.q_starts, batch.kv_lens))]
    ops.decode_attention(*static, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [ops.decode_attention(*static, scale=0.1) for _ in range(2)]
    generator = torch.Generator().manual_seed(3)
    for most in (301, 2, 301, 90, 301):
        static[0].copy_(normal(*q.shape, dtype=BF16))
        static[5].copy_(torch.randint(0, most, (count,), dtype=torch.int32, generator=generator))
        graph.replay()
        now = RaggedBatch(batch.q_starts, static[5].cpu(), batch.page_table, batch.positions, batch.slots, batch.pages, batch.page_size)
        for got in results:
            compare(got, now, static[0].cpu(), *(x.cpu() for x in pools), scale=0.1)


def test_offsets_beyond_2_to_the_31() -> None:
    count, pages = 118, (1 << 31) // (64 * 8 * 128) + 40
    cache = torch.empty(pages, 64, 8, 128, dtype=BF16, device="cuda")
    cache[pages - 12 :] = normal(12, 64, 8, 128, dtype=BF16).cuda()
    table = (torch.arange(3 * count, dtype=torch.int32) % 12).view(count, 3)
    q, starts = normal(count, 16, 128, dtype=BF16), torch.arange(count + 1, dtype=torch.int32)
    lens = (torch.arange(count, dtype=torch.int32) * 29) % 190
    got = ops.decode_attention(q.cuda(), cache, cache, (table + (pages - 12)).cuda(), starts.cuda(), lens.cuda(), scale=0.1)
    small = cache[pages - 12 :].cpu()
    compare(got, RaggedBatch(starts, lens, table, starts, starts, 12, 64), q, small, small, scale=0.1)
