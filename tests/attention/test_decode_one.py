"""decode_attention of one sequence, which has a kernel of its own: ends of steps and boxes, whole and cut segments, tables of any width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import ops
from tests.attention.decode_cases import BF16, FP8, FP16, OPTIONS, S8, call, compare, make, scales_of, sinks_of, tree_mask
from tests.support.compare import assert_same
from tests.support.generate import HUGE, RaggedBatch, normal, poison_allocator

pytestmark = pytest.mark.gpu
LENGTHS = (1, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129, 1000, 5003)


def check(batch: RaggedBatch, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    poison_allocator(q.shape, q.dtype, "cuda")
    got = call(batch, q, k, v, **options)
    compare(got, batch, q, k, v, **options)
    for one, two in zip(got, call(batch, q, k, v, **options), strict=True):
        assert_same(one, two, "two runs")


def widened(batch: RaggedBatch, width: int) -> RaggedBatch:
    table = torch.full((1, width), HUGE, dtype=torch.int32)
    table[:, : batch.page_table.shape[1]] = batch.page_table
    return RaggedBatch(batch.q_starts, batch.kv_lens, table, batch.positions, batch.slots, batch.pages, batch.page_size)


@pytest.mark.parametrize("P", [16, 32, 64, 128])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("dtype", "cache"), [(BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (BF16, S8), (FP16, S8)])
def test_lengths(dtype: torch.dtype, cache: torch.dtype, D: int, P: int) -> None:
    for length in LENGTHS:
        batch, q, k, v = make([1], [length], 8, 2, D, P, dtype, cache)
        check(batch, q, k, v, **scales_of(cache, 2))


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("length", [40, 1025, 9001])
@pytest.mark.parametrize(
    ("H", "K"), [(1, 1), (8, 1), (6, 2), (9, 3), (9, 9), (32, 8), (10, 10), (60, 15), (16, 16), (30, 30), (40, 40), (70, 70)]
)
def test_heads(H: int, K: int, length: int, cache: torch.dtype) -> None:
    """All sizes of clusters, segments whole and cut into few and many parts, groups of 1 to 8 rows."""
    batch, q, k, v = make([1], [min(length, 90_000 // K)], H, K, 128, 64, BF16, cache)
    check(batch, q, k, v, **scales_of(cache, K))


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("length", [9, 600, 7000])
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str, length: int, cache: torch.dtype) -> None:
    options = sinks_of(OPTIONS[case], 8) | scales_of(cache, 2)
    batch, q, k, v = make([1], [length], 8, 2, 128, 16, BF16, cache)
    check(batch, q, k, v, **options)


@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("length", [8, 300, 6000])
@pytest.mark.parametrize(("H", "K", "n"), [(8, 2, 2), (4, 4, 8), (4, 4, 5), (6, 2, 2)])
def test_several_rows(H: int, K: int, n: int, length: int, cache: torch.dtype) -> None:
    """Up to 8 rows to a KV head; fewer of them than max_q; a tree."""
    batch, q, k, v = make([n], [length], H, K, 64, 32, BF16, cache, spare=3)
    check(batch, q, k, v, **scales_of(cache, K))
    check(batch, q, k, v, mask=torch.cat([tree_mask([n], torch.int32), torch.zeros(3, dtype=torch.int32)]), **scales_of(cache, K))
    batch, q, k, v = make([1], [length], H, K, 64, 32, BF16, cache, spare=1)
    check(batch, q, k, v, max_q=8 * K // H, **scales_of(cache, K))


@pytest.mark.parametrize("width", [512, 513, 3000, 1 << 15])
@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("length", [17, 3000, 40000])
def test_wide_tables(width: int, length: int, cache: torch.dtype) -> None:
    """Page numbers asked for with the length, those of a CTA's part alone, and a table of more than it could hold."""
    batch, q, k, v = make([1], [length], 2, 1, 64, 16, BF16, cache)
    check(widened(batch, max(width, batch.page_table.shape[1])), q, k, v)


@pytest.mark.parametrize("skip", [0, 4])
def test_strided_queries_and_pages(skip: int) -> None:
    """q as a slice of qkv, at multiples of 16 and of 8 bytes; K and V interleaved page by page."""
    batch, q, k, v = make([1], [777], 8, 2, 128, 16)
    both = torch.stack([k, v], 1).cuda()
    wide = torch.full((1, 14 * 128 + 8), float("nan"), dtype=BF16, device="cuda")
    rows = wide[:, 256 + skip : 256 + skip + 1024].view(1, 8, 128)
    rows.copy_(q)
    at = batch.to("cuda")
    got = ops.decode_attention(rows, both[:, 0], both[:, 1], at.page_table, at.q_starts, at.kv_lens, scale=128**-0.5)
    compare(got, batch, q, k, v)


def test_a_sequence_without_keys_or_rows() -> None:
    batch, q, k, v = make([1], [100], 8, 2, 128, 64, spare=2)
    at, pools = batch.to("cuda"), (k.cuda(), v.cuda())
    sinks = normal(8)
    for starts, length in (([0, 1], 0), ([0, 0], 0), ([0, 0], 100), ([0, 3], 100)):
        now, lens = torch.tensor(starts, dtype=torch.int32, device="cuda"), torch.tensor([length], dtype=torch.int32, device="cuda")
        poison_allocator(q.shape, q.dtype, "cuda")
        out, lse = ops.decode_attention(q.cuda(), *pools, at.page_table, now, lens, scale=0.1, sinks=sinks.cuda(), max_q=1)
        if starts[1] > 1:
            continue  # more rows than max_q: neither read nor written
        assert_same(out.cpu(), torch.zeros_like(q))
        assert_same(lse.cpu()[: starts[1]], sinks.expand(starts[1], 8))
        assert_same(lse.cpu()[starts[1] :], torch.full((3 - starts[1], 8), float("-inf")))


@pytest.mark.parametrize("cache", [BF16, FP8])
def test_graph_replay_with_changed_lengths(cache: torch.dtype) -> None:
    """Whole and cut by turns; no keys at all; the workspace is that of the replay before."""
    batch, q, k, v = make([1], [20000], 16, 4, 128, 64, BF16, cache)
    pools = [x.float().nan_to_num().to(cache).cuda() for x in (k, v)]
    static = [q.cuda(), *pools, *(x.cuda() for x in (batch.page_table, batch.q_starts, batch.kv_lens))]
    ops.decode_attention(*static, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [ops.decode_attention(*static, scale=0.1) for _ in range(3)]
    for length in (20000, 1, 0, 19999, 900, 20000):
        static[5].fill_(length)
        graph.replay()
        want = ops.decode_attention(*static, scale=0.1)
        now = RaggedBatch(batch.q_starts, static[5].cpu(), batch.page_table, batch.positions, batch.slots, batch.pages, batch.page_size)
        for one in got:
            for g, w in zip(one, want, strict=True):
                assert_same(g, w, f"length {length}")
        compare(want, now, q, *(x.cpu() for x in pools), scale=0.1)


@pytest.mark.parametrize("length", [300, 9000])
def test_in_a_chain_of_dependent_launches(length: int) -> None:
    """Each call reads what the one before wrote, the last key and the length among it, with launches that overlap."""
    batch, q, k, v = make([1], [length], 8, 2, 128, 64)
    at, pools = batch.to("cuda"), [k.cuda(), v.cuda()]
    lens = at.kv_lens.clone()
    page, row = int(batch.page_table[0, (length - 1) // 64]), (length - 1) % 64

    def chain(wait: bool) -> Tensor:
        x = q.cuda()
        for i in range(20):
            lens.fill_(length - i % 2)
            pools[0][page, row] = x.view(4, 2, 128)[i % 4]
            x, _ = ops.decode_attention(x, *pools, at.page_table, at.q_starts, lens, scale=0.1)
            x = ops.softcap(x.view(1, -1) * 30, 3.0).view_as(q)
            if wait:
                torch.cuda.synchronize()
        return x

    assert_same(chain(False), chain(True))
