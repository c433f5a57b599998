"""decode_attention beyond the plain step: trees of speculative tokens, the invariant mode, steps shared with the prefill kernel, long
contexts in FP8."""

from __future__ import annotations

import pytest
import torch

from pyllm import ops
from tests.attention.decode_cases import BF16, FP8, OPTIONS, S8, call, compare, make, oracle, scales_of, sinks_of, tree_mask
from tests.support.compare import assert_same
from tests.support.generate import HUGE, RaggedBatch, normal, poison_allocator

TREES = [([8, 1, 5, 0, 8], [700, 65, 5, 40, 129]), ([33, 64], [900, 64]), ([3] * 40, [3 + 17 * i for i in range(40)])]


def test_a_mask_of_ancestors_alone_is_causal_attention() -> None:
    rows = [4, 1, 3]
    batch, q, k, v = make(rows, [70, 9, 3], 4, 2, 64, 16)
    chain = torch.cat([(1 << torch.arange(1, n + 1)) - 1 for n in rows])
    for dtype in (torch.int32, torch.int64):
        for got, want in zip(call(batch, q, k, v, "cpu", mask=chain.to(dtype)), call(batch, q, k, v, "cpu"), strict=True):
            assert_same(got, want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("tree", range(len(TREES)))
def test_tree(tree: int, case: str, cache: torch.dtype, device: str) -> None:
    rows, lengths = TREES[tree]
    options = sinks_of(OPTIONS[case], 8) | scales_of(cache, 2)
    batch, q, k, v = make(rows, lengths, 8, 2, 64, 16, BF16, cache)
    mask = tree_mask(rows, torch.int32 if max(rows) <= 32 else torch.int64)
    compare(call(batch, q, k, v, device, mask=mask, **options), batch, q, k, v, mask=mask, **options)


@pytest.mark.gpu
def test_a_row_that_its_mask_hides_from_every_key() -> None:
    batch, q, k, v = make([2, 1], [2, 30], 4, 2, 64, 16)
    mask = torch.tensor([0, 2, 0], dtype=torch.int64)
    compare(call(batch, q, k, v, mask=mask), batch, q, k, v, mask=mask)


def one_of(batch: RaggedBatch, b: int) -> RaggedBatch:
    rows = slice(int(batch.q_starts[b]), int(batch.q_starts[b + 1]))
    starts = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32)
    of = batch.kv_lens[b : b + 1], batch.page_table[b : b + 1], batch.positions[rows], batch.slots[rows]
    return RaggedBatch(starts, *of, batch.pages, batch.page_size)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("cache", [BF16, FP8, S8])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("sequences", [5, 40])
def test_invariant(sequences: int, window: int | None, cache: torch.dtype, D: int) -> None:
    """A sequence alone, with a narrower table, has the bits that it has in the batch, and they are right."""
    lengths = [[4000, 1, 130, 900, 33][b % 5] + 3 * (b // 5) for b in range(sequences)]
    rows = [1 + b % 3 if lengths[b] > 2 else 1 for b in range(sequences)]
    batch, q, k, v = make(rows, lengths, 8, 2, D, 32, BF16, cache)
    options = scales_of(cache, 2) | {"window": window, "max_q": 3, "invariant": True}
    got = call(batch, q, k, v, **options)
    compare(got, batch, q, k, v, **options)
    for b in range(5):
        part = slice(int(batch.q_starts[b]), int(batch.q_starts[b + 1]))
        alone = one_of(batch, b)
        narrow = RaggedBatch(alone.q_starts, alone.kv_lens, alone.page_table[:, : -(-lengths[b] // 32)].contiguous(), alone.positions,
                             alone.slots, alone.pages, 32)  # fmt: skip
        for g, w in zip(call(narrow, q[part], k, v, **options), got, strict=True):
            assert_same(g, w[part], f"sequence {b}")


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize("case", ["plain", "all"])
@pytest.mark.parametrize(("H", "K"), [(8, 2), (12, 3), (8, 8), (32, 8)])
def test_many_sequences_whose_heads_are_read_side_by_side(H: int, K: int, case: str, cache: torch.dtype) -> None:
    """Enough segments that a worker is a CTA for each KV head. Up to 8 rows a sequence, of which a group of 4 makes up to four chunks where
    the launch expects one row, as that of a mixed step does; some have no keys, some no rows, some rows belong to none; the longest
    segments are cut."""
    rows = [(1, 1, 8, 0, 3)[b % 5] for b in range(140)]
    lengths = [8 + 29 * b % 700 for b in range(138)] + [6000, 8]
    full, q, k, v = make(rows, lengths, H, K, 128, 64, BF16, cache, spare=5)
    kv_lens = full.kv_lens.clone()
    kv_lens[5::11] = 0
    batch = RaggedBatch(full.q_starts, kv_lens, full.page_table, full.positions, full.slots, full.pages, full.page_size)
    options = sinks_of(OPTIONS[case], H) | scales_of(cache, K)
    at, moved = batch.to("cuda"), {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}

    def mixed() -> tuple[torch.Tensor, torch.Tensor]:
        return ops.paged_attention(q.cuda(), k.cuda(), v.cuda(), at.page_table, at.q_starts, at.kv_lens, scale=128**-0.5, **moved)

    for run in (lambda: call(batch, q, k, v, max_q=8, **options), mixed):
        poison_allocator(q.shape, BF16, "cuda")
        got = run()
        compare((got[0][: batch.T], got[1][: batch.T]), batch, q[: batch.T], k, v, **options)
        assert_same(got[0][batch.T :], torch.zeros_like(got[0][batch.T :]))
        assert (got[1][batch.T :] == -torch.inf).all()
        for one, two in zip(got, run(), strict=True):
            assert_same(one, two, "two runs")


@pytest.mark.gpu
@pytest.mark.parametrize("long", [3, 500])
def test_sequences_with_more_rows_are_left_alone(long: int) -> None:
    """Neither read (their table is poison) nor written: outputs start as NaN, as torch fills new memory in its deterministic mode."""
    rows = [1, long, 2, 0, long, 2]
    batch, q, k, v = make(rows, [700, 900, 65, 10, 501, 2], 8, 2, 128, 16, spare=2)
    table = batch.page_table.clone()
    for b in (1, 4):
        table[b] = HUGE
    left = RaggedBatch(batch.q_starts, batch.kv_lens, table, batch.positions, batch.slots, batch.pages, 16)
    torch.use_deterministic_algorithms(True)
    try:
        out, lse = call(left, q, k, v, max_q=2)
    finally:
        torch.use_deterministic_algorithms(False)
    starts = batch.q_starts.tolist()
    for b in range(len(rows)):
        part = slice(starts[b], starts[b + 1])
        if rows[b] > 2:
            assert out[part].isnan().all() and lse[part].isnan().all()
        else:
            compare((out, lse), batch, q, k, v, rows=part)
    assert_same(out[-2:], torch.zeros_like(out[-2:]))


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [FP8, S8])
def test_scales_of_powers_of_two_change_no_bit(cache: torch.dtype) -> None:
    """The same values stored with other scales: products and sums differ by powers of two alone."""
    batch, q, k, v = make([1] * 3, [700, 64, 65], 8, 2, 128, 32)
    k, v = (x.nan_to_num(1.0).sign() * (8 + (x.nan_to_num(1.0).abs() * 2).floor().clamp(0, 4) * 8) for x in (k, v))  # 8, 16 ... 40
    results = []
    for s in (1.0, 2.0, 4.0):
        scale = torch.tensor([s / 16])
        results.append(call(batch, q, (k / s).to(cache), (v / s).to(cache), k_scale=scale, v_scale=scale))
    for other in results[1:]:
        for g, w in zip(other, results[0], strict=True):
            assert_same(g, w)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [BF16, FP8])
def test_long_context(cache: torch.dtype) -> None:
    """128k keys against fp64: the bound of `compare`, and the direction of each row."""
    batch, q, k, v = make([1], [131072], 8, 2, 64, 64, BF16, cache)
    options = scales_of(cache, 2)
    got = call(batch, q, k, v, **options)
    compare(got, batch, q, k, v, **options)
    want, _, _ = oracle(batch, q, k, v, scale=64**-0.5, **options)
    assert torch.cosine_similarity(got[0].cpu().double(), want, -1).min() > 0.9999


@pytest.mark.gpu
def test_a_graph_of_many_calls_replayed() -> None:
    """Sequences cut between workers: the parts left by one replay are not taken for those of the next."""
    batch, _, k, v = make([1] * 3, [9000, 700, 3001], 8, 2, 128, 16)
    at, pools = batch.to("cuda"), [x.nan_to_num().cuda() for x in (k, v)]
    queries = [normal(3, 8, 128, dtype=BF16).cuda() for _ in range(4)]
    static = queries[0].clone()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return ops.decode_attention(static, *pools, at.page_table, at.q_starts, at.kv_lens, scale=0.1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run() for _ in range(3)]
    for x in queries * 2:
        static.copy_(x)
        graph.replay()
        for got in results:
            compare(got, batch, x.cpu(), *(p.cpu() for p in pools), scale=0.1)
