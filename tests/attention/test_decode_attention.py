"""decode_attention: the reference is paged_attention's (tested there); the kernel against fp64. Trees, the invariant mode, mixed steps:
test_decode_modes.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import ops
from tests.attention.decode_cases import BF16, FP8, FP16, LENGTHS, OPTIONS, S8, call, compare, make, scales_of, sinks_of
from tests.support.compare import assert_same
from tests.support.generate import HUGE, RaggedBatch, normal, poison_allocator


def test_reference_is_that_of_paged_attention() -> None:
    batch, q, k, v = make([1, 3, 2, 0], [5, 70, 2, 9], 6, 2, 64, 16)
    got = call(batch, q, k, v, "cpu", max_q=3, window=20)
    want = ops.paged_attention(q, k, v, batch.page_table, batch.q_starts, batch.kv_lens, scale=64**-0.5, window=20)
    again = ops.paged_attention(q, k, v, batch.page_table, batch.q_starts, batch.kv_lens, scale=64**-0.5, window=20, max_q=3)
    for g, w, a in zip(got, want, again, strict=True):
        assert_same(g, w)
        assert_same(a, w)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_of_a_padded_sequence_see_nothing(sinks: bool) -> None:
    q_starts, kv_lens = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 0], dtype=torch.int32)
    cache, table = torch.full((1, 16, 1, 64), float("nan"), dtype=BF16), torch.full((2, 1), HUGE, dtype=torch.int32)
    logits = normal(2) if sinks else None
    out, lse = ops.decode_attention(normal(3, 2, 64, dtype=BF16), cache, cache, table, q_starts, kv_lens, scale=1.0, sinks=logits)
    assert_same(out, torch.zeros_like(out))
    assert_same(lse[:2], torch.full((2, 2), float("-inf")) if logits is None else logits.expand(2, 2))
    assert_same(lse[2:], torch.full((1, 2), float("-inf")))


def arguments(device: str = "cpu") -> tuple[Any, ...]:
    batch, q, k, v = make([1, 2, 1], [5, 40, 1], 4, 2, 64, 16)
    at = batch.to(device)
    pools = (k.nan_to_num().to(device), v.nan_to_num().to(device))
    return q.to(device), *pools, at.page_table, at.q_starts, at.kv_lens, 0.2, 0, 0.0, None, None, None, 2, None, False


def test_opcheck_and_compile() -> None:
    args = arguments()
    torch.library.opcheck(torch.ops.pyllm.decode_attention.default, args)
    compiled = torch.compile(ops.decode_attention, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*args[:6], scale=0.2, max_q=2)[0], ops.decode_attention(*args[:6], scale=0.2, max_q=2)[0])


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def caches(*shape: int, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    return {"k_cache": zeros(*shape, dtype=dtype), "v_cache": zeros(*shape, dtype=dtype)}


FP32 = torch.float32
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q dims": ({"q": zeros(3, 64)}, r"q has 2 dimensions, expected 3"),
    "q dtype": ({"q": zeros(4, 4, 64, dtype=FP32), **caches(5, 16, 2, 64, dtype=FP32)}, r"q is .*float32, expected bfloat16 or float16"),
    "D": ({"q": zeros(4, 4, 32), **caches(5, 16, 2, 32)}, r"q \.size\(2\) is 32, expected 64, 96, 128, 192 or 256"),
    "P": (caches(5, 24, 2, 64), r"k_cache \.size\(1\) is 24, expected a power of two, at least 16"),
    "H": ({"q": zeros(4, 3, 64)}, r"q has H=3 heads, expected a multiple of K=2"),
    "mask dtype": ({"mask": zeros(4)}, r"mask is .*bfloat16, expected int32 or int64"),
    "mask rows": ({"mask": zeros(3, dtype=torch.int64)}, r"mask.*3.*, expected T=4"),
    "mask bits": ({"mask": zeros(4, dtype=torch.int32), "max_q": 33}, r"mask has 32 bits a row, expected at least max_q=33"),
    "max_q": ({"max_q": 65}, r"max_q is 65, expected 1 to 64"),
    "sinks": ({"sinks": zeros(4)}, r"sinks is .*bfloat16, expected float32"),
    "k_scale": ({"k_scale": zeros(3, dtype=FP32)}, r"k_scale has .*, expected .*K=2"),
    "window": ({"window": -1}, r"window is -1, expected more than 0"),
    "softcap": ({"softcap": -1.0}, r"softcap is -1\.0, expected more than 0"),
}


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, device: str) -> None:
    names = ("q", "k_cache", "v_cache", "page_table", "q_starts", "kv_lens")
    change, message = ERRORS[case]
    args = dict(zip(names, arguments()[:6], strict=True)) | {"scale": 0.2, "max_q": 2} | change
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in args.items()}
    native = device == "cuda" and case not in ("window", "softcap")  # those two are seen before the dispatch
    with pytest.raises(RuntimeError if native else ValueError, match=f"decode_attention: {message}"):
        ops.decode_attention(**moved)


def test_more_rows_than_max_q_is_an_error() -> None:
    args = arguments()
    with pytest.raises(ValueError, match=r"max_q is 1, expected at least the 2 query rows of the longest sequence"):
        ops.decode_attention(*args[:6], scale=0.2, max_q=1)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("P", [16, 32, 64, 128])
@pytest.mark.parametrize(("dtype", "cache"), [(BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (BF16, S8), (FP16, S8)])
def test_kernel(dtype: torch.dtype, cache: torch.dtype, P: int, D: int) -> None:
    batch, q, k, v = make([1] * len(LENGTHS), list(LENGTHS), 8, 2, D, P, dtype, cache, spare=2)
    scales = scales_of(cache, 2)
    poison_allocator(q.shape, dtype, "cuda")
    compare(call(batch, q, k, v, **scales), batch, q, k, v, **scales)


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "K"), [(1, 1), (3, 1), (9, 3), (16, 2), (16, 1), (20, 1), (40, 1)])
@pytest.mark.parametrize("case", OPTIONS)
def test_groups_and_options(case: str, H: int, K: int) -> None:
    options = sinks_of(OPTIONS[case], H)
    batch, q, k, v = make([1] * len(LENGTHS), list(LENGTHS), H, K, 64, 16)
    compare(call(batch, q, k, v, **options), batch, q, k, v, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize(("D", "n"), [(64, 2), (128, 4), (128, 8), (256, 3)])
def test_several_rows_per_sequence(D: int, n: int, case: str) -> None:
    """Ragged: some sequences have fewer rows than max_q, some none."""
    options = sinks_of(OPTIONS[case], 8)
    rows = [n, 0, n - 1, n, 1, n, n, 0, n, 1, n]
    batch, q, k, v = make(rows, [max(L, r) for L, r in zip(LENGTHS, rows, strict=True)], 8, 2, D, 32, spare=3)
    compare(call(batch, q, k, v, max_q=n, **options), batch, q, k, v, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [BF16, FP8])
@pytest.mark.parametrize(
    "lengths", [[1024], [4096], [9000], [5000, 40, 3000], [300] * 40, [7] * 300, [1 + 37 * i % 600 for i in range(260)]], ids=len
)
def test_batches_and_long_sequences(lengths: list[int], cache: torch.dtype) -> None:
    batch, q, k, v = make([1] * len(lengths), lengths, 8, 2, 128, 64, BF16, cache)
    got = call(batch, q, k, v)
    compare(got, batch, q, k, v)
    for one, two in zip(got, call(batch, q, k, v), strict=True):
        assert_same(one, two, "two runs")


SHARES = {  # 4 KV heads: how segments are shared out
    "a cluster each": [700, 3],
    "cut, smaller workers": [20000],
    "cut, unequal": [9000, 1, 0, 4000],
    "a pair of CTAs each": [2000] * 12,
    "one CTA each, cut": [500] * 20,
    "one CTA each, uncut": [500] * 29,
    "two CTAs to an SM, fewer than fit": [300] * 48,
    "two CTAs to an SM, uncut": [300] * 65,
    "two CTAs to an SM, some empty": [0 if i % 5 == 0 else 300 for i in range(80)],
    "two CTAs to an SM, several each": [130] * 260,
    "two CTAs to an SM, cut": [1 + 61 * i % 1500 for i in range(100)],
}


@pytest.mark.gpu
@pytest.mark.parametrize(("cache", "D"), [(BF16, 64), (BF16, 128), (FP8, 64), (FP8, 128), (S8, 128), (FP8, 96), (BF16, 256)])
@pytest.mark.parametrize("case", SHARES)
def test_shares(case: str, cache: torch.dtype, D: int) -> None:
    lengths = SHARES[case]
    batch, q, k, v = make([1] * len(lengths), lengths, 8, 4, D, 64, BF16, cache)
    scales = scales_of(cache, 4)
    got = call(batch, q, k, v, **scales)
    compare(got, batch, q, k, v, **scales)
    for one, two in zip(got, call(batch, q, k, v, **scales), strict=True):
        assert_same(one, two, "two runs")


@pytest.mark.gpu
def test_strided_rows_and_pages() -> None:
    """q as a slice of qkv, K and V interleaved page by page."""
    batch, q, k, v = make([1] * len(LENGTHS), list(LENGTHS), 8, 2, 128, 16)
    both = torch.stack([k, v], 1).cuda()
    wide = torch.full((q.shape[0], 14, 128), float("nan"), dtype=BF16, device="cuda")
    wide[:, 2:10] = q.cuda()
    at = batch.to("cuda")
    got = ops.decode_attention(wide[:, 2:10], both[:, 0], both[:, 1], at.page_table, at.q_starts, at.kv_lens, scale=128**-0.5)
    compare(got, batch, q, k, v)


@pytest.mark.gpu
def test_graph_replay_with_changed_lengths() -> None:
    """The table is as wide as the longest sequence; sequences grow, shrink and vanish between replays."""
    batch, q, k, v = make([1] * 5, [700, 900, 64, 1, 333], 8, 2, 128, 16)
    pools = [x.nan_to_num().cuda() for x in (k, v)]
    static = [q.cuda(), *pools, *(x.cuda() for x in (batch.page_table, batch.q_starts, batch.kv_lens))]
    ops.decode_attention(*static, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.decode_attention(*static, scale=0.1)
    for lens in ([700, 900, 64, 1, 333], [1, 1, 1, 1, 1], [0, 900, 0, 0, 0], [699, 17, 63, 0, 65]):
        static[5].copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        for g, w in zip(got, ops.decode_attention(*static, scale=0.1), strict=True):
            assert_same(g, w, f"lengths {lens}")
        now = RaggedBatch(batch.q_starts, static[5].cpu(), batch.page_table, batch.positions, batch.slots, batch.pages, batch.page_size)
        compare(got, now, q, *(x.cpu() for x in pools), scale=0.1)


@pytest.mark.gpu
def test_in_a_chain_of_dependent_launches() -> None:
    """Each call reads what the one before wrote, with launches that overlap."""
    batch, q, k, v = make([1] * 3, [900, 64, 333], 8, 2, 128, 64)
    at, pools = batch.to("cuda"), [k.cuda(), v.cuda()]
    args = (at.page_table, at.q_starts, at.kv_lens)

    def chain(wait: bool) -> Tensor:
        x = q.cuda()
        for _ in range(20):
            x, _ = ops.decode_attention(x, *pools, *args, scale=0.1)
            x = ops.softcap(x.view(3, -1) * 30, 3.0).view_as(q)
            if wait:
                torch.cuda.synchronize()
        return x

    assert_same(chain(False), chain(True))


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    pages = (1 << 31) // (64 * 8 * 128) + 40
    cache = torch.empty(pages, 64, 8, 128, dtype=BF16, device="cuda")
    table = torch.arange(pages - 12, pages, dtype=torch.int32, device="cuda").view(1, 12)
    cache[pages - 12 :] = normal(12, 64, 8, 128, dtype=BF16).cuda()
    q = normal(1, 16, 128, dtype=BF16)
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([12 * 64 - 3], dtype=torch.int32)
    got = ops.decode_attention(q.cuda(), cache, cache, table, starts.cuda(), lens.cuda(), scale=0.1)
    small = cache[pages - 12 :].cpu()
    at = RaggedBatch(starts, lens, torch.arange(12, dtype=torch.int32).view(1, 12), starts, starts, 12, 64)
    compare(got, at, q, small, small, scale=0.1)


@pytest.mark.gpu
def test_paged_attention_calls_it() -> None:
    batch, q, k, v = make([1] * len(LENGTHS), list(LENGTHS), 8, 2, 128, 16)
    at = batch.to("cuda")
    args = (q.cuda(), k.cuda(), v.cuda(), at.page_table, at.q_starts, at.kv_lens)
    for got, want in zip(ops.paged_attention(*args, scale=0.1, max_q=1), ops.decode_attention(*args, scale=0.1), strict=True):
        assert_same(got, want)


@pytest.mark.gpu
def test_opcheck_on_cuda_and_empty() -> None:
    args = arguments("cuda")
    torch.library.opcheck(torch.ops.pyllm.decode_attention.default, args)
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    out, lse = ops.decode_attention(args[0][:0], args[1], args[2], args[3][:0], none, none[:0], scale=0.2)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
