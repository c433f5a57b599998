"""paged_attention: reference and composition (plain torch, also on a CPU) against fp64 formulas, the kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import ops
from pyllm.ops import attention
from tests.support.compare import EPS, assert_close
from tests.support.generate import filled_pools, gather, normal, poison_allocator, ragged_batch

PAGE, KV, DIM = 16, 2, 24
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 5},
    "window-full": {"causal": False, "window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 7, "softcap": 1.5, "sinks": True},
}
LENGTHS = ([1, 0, 5, 17, 1], [16, 0, 5, 33, 1])


def make(
    q_lens: list[int], kv_lens: list[int], heads: int, dtype: torch.dtype = torch.float32, cache: torch.dtype | None = None
) -> tuple[Any, ...]:
    batch = ragged_batch(q_lens, kv_lens, page_size=PAGE)
    k, v = filled_pools(batch, KV, DIM, cache or dtype)
    q = normal(sum(q_lens), heads, DIM, dtype=dtype)
    return batch, q, k, v


def formula(batch: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = True, window: int | None = None, softcap: float
| None = None,
            sinks: Tensor | None = None, k_scale: float = 1.0, v_scale: float = 1.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fp64, one sequence, one head, one query at a time."""
    starts, lens = batch.q_starts.tolist(), batch.kv_lens.tolist()
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    for b, length in enumerate(lens):
        keys, values = gather(k, batch, b).double() * k_scale, gather(v, batch, b).double() * v_scale
        n = starts[b + 1] - starts[b]
        for j in range(n):
            at = length - n + j
            seen = [i for i in range(length) if (not causal or i <= at) and (not window or i > at - window)]
            for h in range(q.shape[1]):
                g = h * KV // q.shape[1]
                s = keys[seen, g] @ q[starts[b] + j, h].double() * scale
                s = softcap * torch.tanh(s / softcap) if softcap else s
                total = s if sinks is None else torch.cat([s, sinks[h : h + 1].double()])
                lse[starts[b] + j, h] = torch.logsumexp(total, 0)
                out[starts[b] + j, h] = torch.exp(s - lse[starts[b] + j, h]) @ values[seen, g]
    return out, lse


def call(f: Callable[..., Any], batch: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    o = {"causal": True, "window": 0, "softcap": 0.0, "sinks": None, "k_scale": None, "v_scale": None} | options
    return f(q, k, v, batch.page_table, batch.q_starts, batch.kv_lens, scale, *o.values())


def bounds(dtype: torch.dtype, v: float, keys: int) -> tuple[float, float]:
    """|o| <= max |v| = v. fp32 inside: scores err by DIM 2^-24 |s| (|s| < ~10 here), so p by ~1e-5 relative at worst; then one rounding
    to dtype."""
    inside = 16 * (DIM + keys) * EPS[torch.float32]
    return v * (inside + EPS[dtype]), inside * 10


@pytest.mark.parametrize("implementation", ["reference", "composition"])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("case", CASES)
def test_against_fp64(case: str, heads: int, implementation: str) -> None:
    """Unused pages, page tails and table tails are poison (NaN, huge ids), so any read of them shows."""
    options = dict(CASES[case])
    batch, q, k, v = make(*LENGTHS, heads)
    if options.get("sinks"):
        options["sinks"] = normal(heads)
    f = getattr(attention, f"_attention_{implementation}")
    got, lse = call(f, batch, q, k, v, 0.2, **options)
    want, want_lse = formula(batch, q, k, v, 0.2, **options)
    o_bound, lse_bound = bounds(q.dtype, 5.0, 33)
    assert_close(got, want, atol=o_bound, what="out")
    assert_close(lse, want_lse, atol=lse_bound, what="lse")


@pytest.mark.parametrize("implementation", ["reference", "composition"])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_low_precision_and_fp8_cache(cache: torch.dtype, implementation: str) -> None:
    batch, q, k, v = make(*LENGTHS, 4, torch.bfloat16, cache)
    scales = {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0])} if cache != torch.bfloat16 else {}
    got, _ = call(getattr(attention, f"_attention_{implementation}"), batch, q, k, v, 0.2, **scales)
    want = torch.zeros(q.shape, dtype=torch.float64)
    for g in range(KV):  # per-head scales: one KV head at a time through the scalar formula
        scale = {"k_scale": scales["k_scale"][g].item(), "v_scale": 3.0} if scales else {}
        rows = slice(g * 2, g * 2 + 2)
        want[:, rows] = formula(batch, q, k, v, 0.2, **scale)[0][:, rows]
    assert_close(got, want, atol=bounds(torch.bfloat16, 15.0 if scales else 5.0, 33)[0], what="out")


def test_rows_of_no_sequence_and_empty_problems() -> None:
    batch, q, k, v = make([3, 2], [3, 20], 4)
    more = torch.cat([q, torch.full((4, 4, DIM), float("nan"))])
    for name in ("reference", "composition"):
        f = getattr(attention, f"_attention_{name}")
        out, lse = call(f, batch, more, k, v, 0.2)
        assert torch.equal(out[5:], torch.zeros(4, 4, DIM))
        assert torch.equal(lse[5:], torch.full((4, 4), float("-inf")))
        assert_close(out[:5], call(f, batch, q, k, v, 0.2)[0], what="out")
        empty = ragged_batch([0], [0], page_size=PAGE)
        assert call(f, empty, q[:0], k, v, 0.2)[0].shape == (0, 4, DIM)


def test_composition_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, q, k, v = make(*LENGTHS, 4)
    want = call(attention._attention_composition, batch, q, k, v, 0.2)
    monkeypatch.setattr(attention, "_SCORE_BYTES", 1)
    got = call(attention._attention_composition, batch, q, k, v, 0.2)
    for g, w in zip(got, want, strict=True):  # a matrix product of other sizes may add in another order
        assert_close(g, w, atol=bounds(q.dtype, 5.0, 33)[0])


def test_opcheck_and_compile() -> None:
    batch, q, k, v = make(*LENGTHS, 4)
    args = (q, k.nan_to_num(), v.nan_to_num(), batch.page_table, batch.q_starts, batch.kv_lens, 0.2, True, 0, 0.0, None, None, None)
    torch.library.opcheck(torch.ops.pyllm.paged_attention.default, args)
    compiled = torch.compile(ops.paged_attention, fullgraph=True, backend="aot_eager")
    got = compiled(q, k, v, batch.page_table, batch.q_starts, batch.kv_lens, scale=0.2)[0]
    assert_close(got, ops.paged_attention(q, k, v, batch.page_table, batch.q_starts, batch.kv_lens, scale=0.2)[0])


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q": ({"q": torch.zeros(3, 8)}, r"q has 2 dimensions, expected 3 \[T, H, D\]"),
    "k dims": ({"k_cache": torch.zeros(4, 16, 8)}, r"k_cache has 3 dimensions, expected 4 \[pages, P, K, D\]"),
    "v": ({"v_cache": torch.zeros(4, 16, 2, 16)}, r"v_cache has shape \(4, 16, 2, 16\), expected \(4, 16, 2, 8\) like k_cache"),
    "D": ({"q": torch.zeros(3, 4, 16)}, r"k_cache \.size\(3\) is 8, expected D=16 \(from q\)"),
    "H": ({"q": torch.zeros(3, 3, 8)}, r"q has H=3 heads, expected a multiple of K=2"),
    "dtype": (
        {"q": torch.zeros(3, 4, 8, dtype=torch.bfloat16)},
        r"k_cache is torch\.float32, expected torch\.bfloat16 like q or float8_e4m3fn",
    ),
    "table": ({"page_table": torch.zeros(2, 1, dtype=torch.int64)}, r"page_table is torch\.int64, expected int32"),
    "starts": ({"q_starts": torch.zeros(2, dtype=torch.int32)}, r"q_starts \.size\(0\) is 2, expected B\+1=3"),
    "lens": ({"kv_lens": torch.zeros(3, dtype=torch.int32)}, r"kv_lens \.size\(0\) is 3, expected B=2"),
    "sinks": ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\), expected H=4"),
    "window": ({"window": -1}, r"window is -1, expected more than 0 \(or None\)"),
    "no window": ({"window": 0}, r"window is 0, expected more than 0 \(or None\)"),
    "scale": ({"scale": -1.0}, r"scale is -1\.0, expected more than 0"),
    "no scale": ({"scale": float("nan")}, r"scale is nan, expected more than 0"),
    "softcap": ({"softcap": -1.0}, r"softcap is -1\.0, expected more than 0 \(or None\)"),
    "k_scale": ({"k_scale": torch.ones(3)}, r"k_scale has shape \(3,\), expected 1 or K=2"),
    "v_scale": ({"v_scale": torch.ones(2).half()}, r"v_scale is torch\.float16, expected float32"),
    "q dtype": ({"q": torch.zeros(3, 4, 8, dtype=torch.int32)}, r"q is torch\.int32, expected bfloat16"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, device: str) -> None:
    cache = torch.zeros(4, 16, 2, 8)
    starts, lens = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    good = {"q": torch.zeros(3, 4, 8), "k_cache": cache, "v_cache": cache, "page_table": torch.zeros(2, 1, dtype=torch.int32)}
    good |= {"q_starts": starts, "kv_lens": lens, "scale": 1.0}
    change, message = ERRORS[case]
    args = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in (good | change).items()}
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        ops.paged_attention(**args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": [[4], [0]]}, r"page_table \[0\] holds page 4, expected 0\.\.3"),
        ({"page_table": [[0], [-1]]}, r"page_table \[1\] holds page -1"),
        ({"kv_lens": [1, 17]}, r"kv_lens \[1\] is 17, expected at most the 16 tokens of a page_table row"),
        ({"q_starts": [0, 1, 4]}, r"q_starts is \[0, 1, 4\], expected rising numbers from 0 to T=3"),
        ({"q_starts": [0, 3, 1]}, r"q_starts is \[0, 3, 1\]"),
    ],
)
def test_the_reference_reads_nothing_outside_the_cache(change: dict[str, Any], message: str) -> None:
    cache = torch.zeros(4, 16, 2, 8)
    index = {"page_table": [[0], [1]], "q_starts": [0, 1, 3], "kv_lens": [1, 2]} | change
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        ops.paged_attention(torch.zeros(3, 4, 8), cache, cache, **{k: torch.tensor(v).int() for k, v in index.items()}, scale=1.0)


def test_fewer_keys_than_queries_is_an_error() -> None:
    batch, q, k, v = make([3], [3], 4)
    with pytest.raises(ValueError, match=r"kv_lens \[0\] is 2, expected at least the sequence's 3 query rows"):
        ops.paged_attention(q, k, v, batch.page_table, batch.q_starts, torch.tensor([2], dtype=torch.int32), scale=0.2)


MIXED = ([1, 300, 0, 9, 8, 1, 40, 3, 130], [200, 300, 5, 400, 8, 33, 40, 3, 131])  # decodes of up to 8 rows, and chunks


def mixed(dim: int, dtype: torch.dtype, cache: torch.dtype, heads: int = 4, page: int = PAGE) -> tuple[Any, ...]:
    batch = ragged_batch(*MIXED, page_size=page, seed=0)
    k, v = filled_pools(batch, KV, dim, cache, seed=1)
    return batch, normal(sum(MIXED[0]) + 5, heads, dim, dtype=dtype, seed=2), k, v


def on_cuda(batch: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    moved = {n: t.cuda() if isinstance(t, Tensor) else t for n, t in options.items()}
    index = [t.cuda() for t in (batch.page_table, batch.q_starts, batch.kv_lens)]
    return ops.paged_attention(q.cuda(), k.cuda(), v.cuda(), *index, scale=scale, **moved)


def check_mixed(problem: tuple[Any, ...], got: tuple[Tensor, Tensor], extra: float, **options: Any) -> None:
    """Against the fp32 reference. Weights and o are each rounded once: 2 u sum p |v| (with an fp8 cache decodes round weights to fp16,
    chunks q and weights to e4m3: `extra` of the size)."""
    batch, q, k, v = problem
    wide = (q.float(), k.float(), v.float())
    names = {n: o for n, o in options.items() if n != "max_q"}
    want, lse = call(attention._attention_reference, batch, *wide, 0.1, **names)
    size, _ = call(attention._attention_reference, batch, wide[0], wide[1], wide[2].abs(), 0.1, **names)
    bound = size.amax(-1, keepdim=True) * (2 * EPS[q.dtype] + 2e-5 + extra)
    assert_close(got[0], want, atol=bound, what="out")
    assert_close(got[1], lse, atol=5e-5 + extra, what="lse")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_mixed_step(dim: int, case: str) -> None:
    """Every row is written exactly once: decodes by one kernel, chunks and rows of no sequence by the other."""
    options = dict(CASES[case])
    if options.pop("sinks", False):
        options["sinks"] = normal(4, seed=3)
    dtype = torch.float16 if dim == 192 else torch.bfloat16
    problem = mixed(dim, dtype, dtype)
    poison_allocator(problem[1].shape, dtype, "cuda")
    got = on_cuda(*problem, 0.1, **options)
    check_mixed(problem, got, 0.0, **options)
    again = on_cuda(*problem, 0.1, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_mixed_step_over_an_fp8_cache(dim: int) -> None:
    """e4m3 rounds each of q's values by 2^-4 relative; a score is a sum of dim products of independent sign, so it errs by about
    2^-5 of its size (below 3 here), and p by as much: an eighth of the size covers scores and weights."""
    problem = mixed(dim, torch.bfloat16, torch.float8_e4m3fn)
    scales = {"k_scale": torch.tensor([0.5, 0.25]), "v_scale": torch.tensor([2.0])}
    got = on_cuda(*problem, 0.1, **scales)
    check_mixed(problem, got, 0.125, **scales)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "page", "dtype"), [(24, 16, torch.bfloat16), (128, 8, torch.float16), (100, 12, torch.float32)])
def test_other_shapes_on_cuda(dim: int, page: int, dtype: torch.dtype) -> None:
    problem = mixed(dim, dtype, dtype, page=page)
    check_mixed(problem, on_cuda(*problem, 0.1, window=70), 1e-5, window=70)


@pytest.mark.gpu
def test_cuda_graph_replay_with_changed_lengths() -> None:
    """Decodes become chunks and the other way round in the same graph."""
    batch = ragged_batch([64, 64, 64], [256, 256, 256], page_size=PAGE, seed=0)
    k, v = (t.cuda() for t in filled_pools(batch, KV, 128, torch.bfloat16, seed=1))
    q = normal(192, 4, 128, dtype=torch.bfloat16, seed=2).cuda()
    table, starts, lens = batch.page_table.cuda(), batch.q_starts.cuda(), batch.kv_lens.cuda()

    def run() -> tuple[Tensor, Tensor]:
        return ops.paged_attention(q, k, v, table, starts, lens, scale=0.1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for new_starts, new_lens in (([0, 1, 2, 150], [30, 256, 200]), ([0, 64, 65, 66], [64, 1, 17]), ([0, 8, 17, 17], [9, 9, 0])):
        starts.copy_(torch.tensor(new_starts, dtype=torch.int32))
        lens.copy_(torch.tensor(new_lens, dtype=torch.int32))
        graph.replay()
        for a, b in zip(got, run(), strict=True):
            assert_close(a, b, what=f"starts {new_starts}")


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [2, 8, 16, 32])
def test_mixed_step_of_every_group(heads: int, cache: torch.dtype) -> None:
    """Sequences of 1 to 8 rows in groups of 1 to 16: each has as many chunks of query rows as it fills, beside chunks of prompts."""
    options = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])} if cache == torch.float8_e4m3fn else {}
    problem = mixed(128, torch.bfloat16, cache, heads)
    poison_allocator(problem[1].shape, torch.bfloat16, "cuda")
    got = on_cuda(*problem, 0.1, **options)
    check_mixed(problem, got, 0.125 if options else 0.0, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_follows_a_mixed_step_sees_all_of_it_in_a_graph(cache: torch.dtype) -> None:
    """Prefill starts while decode still runs and is long done before it here: 40 decodes of 9,000 keys beside a prompt of 9 tokens. The
    kernel behind, whose launch waits for prefill alone, must find the rows of decode, too."""
    batch = ragged_batch([1] * 40 + [9], [9000] * 40 + [9], page_size=64, seed=0)
    k, v = (t.cuda() for t in filled_pools(batch, KV, 128, cache, seed=1))
    q = normal(49, 4, 128, dtype=torch.bfloat16, seed=2).cuda()
    index = [t.cuda() for t in (batch.page_table, batch.q_starts, batch.kv_lens)]

    def run() -> tuple[Tensor, Tensor]:
        out = ops.paged_attention(q, k, v, *index, scale=0.1)[0].view(49, -1)
        return out, ops.softcap(out, 1e4)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, after = run()
    for seed in range(20):
        q.copy_(normal(49, 4, 128, dtype=torch.bfloat16, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(after, out.double(), rtol=2 * EPS[torch.bfloat16], what=f"replay {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("before", [0, 9000])
def test_a_prompt_that_goes_first_in_a_graph(before: int) -> None:
    """80 decodes of 40 keys fill the GPU, a prompt of 40 rows does not, so it goes first and decode runs beside it: without a wait for q,
    which the kernel ahead of both has just written, and done long before it where the prompt's rows see 9,000 keys. What follows must find
    all rows. Against the two ops by themselves: each is within 2 u sum p |v| of the exact result, with |v| below 5."""
    batch = ragged_batch([1] * 80 + [40], [40] * 80 + [before + 40], page_size=64, seed=0)
    k, v = (t.cuda() for t in filled_pools(batch, KV, 128, torch.bfloat16, seed=1))
    q = normal(120, 4, 128, dtype=torch.bfloat16, seed=2).cuda()
    table, starts, lens = (t.cuda() for t in (batch.page_table, batch.q_starts, batch.kv_lens))
    prompt = torch.tensor([0, 40], dtype=torch.int32, device="cuda")

    def run() -> tuple[Tensor, Tensor]:
        out = ops.paged_attention(ops.softcap(q.view(120, -1), 1e4).view_as(q), k, v, table, starts, lens, scale=0.1)[0]
        return out, ops.softcap(out.view(120, -1), 1e4).view_as(out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, after = run()
    for seed in range(10):
        q.copy_(normal(120, 4, 128, dtype=torch.bfloat16, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        decodes = ops.decode_attention(q[:80], k, v, table[:80], starts[:81], lens[:80], scale=0.1)[0]
        chunk = ops.prefill_attention(q[80:], k, v, prompt, page_table=table[80:], kv_lens=lens[80:], scale=0.1)[0]
        assert_close(after, torch.cat([decodes, chunk]).double(), atol=4 * EPS[torch.bfloat16] * 5, what=f"replay {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_long_prompt_shared_by_two_launches_in_a_graph(dim: int) -> None:
    """A prompt of more tiles than half of the SMs take in two turns goes first there, and a second launch of prefill takes the SMs that
    decode leaves. The same graph then meets prompts alone, one tile, and none at all, with rows of no sequence behind. Against prefill of
    all sequences: each op is within 2 u sum p |v| of the exact result, with |v| below 5."""
    T = 7080
    batch = ragged_batch([1] * 80 + [7000], [128] * 80 + [7000], page_size=64, seed=0)
    k, v = (t.cuda() for t in filled_pools(batch, KV, dim, torch.bfloat16, seed=1))
    q = normal(T, 4, dim, dtype=torch.bfloat16, seed=2).cuda()
    table, starts, lens = batch.page_table.cuda(), batch.q_starts.cuda(), batch.kv_lens.cuda()

    def run() -> tuple[Tensor, Tensor]:
        out = ops.paged_attention(q, k, v, table, starts, lens, scale=0.1)[0]
        return out, ops.softcap(out.view(T, -1), 1e4).view_as(out)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, after = run()
    steps = {
        "prompt and decodes": ([1] * 80 + [7000], [128] * 80 + [7000]),
        "prompts": ([87] * 80 + [120], [100] * 80 + [7000]),
        "a tile": ([1] * 80 + [10], [60] * 80 + [10]),
        "decodes": ([8] * 80 + [0], [128] * 80 + [0]),
        "the first again": ([1] * 80 + [7000], [128] * 80 + [7000]),
    }
    for name, (rows, keys) in steps.items():
        starts.copy_(torch.tensor([0, *rows]).cumsum(0))
        lens.copy_(torch.tensor(keys))
        want = ops.prefill_attention(q, k, v, starts, page_table=table, kv_lens=lens, scale=0.1)[0]
        for turn in range(3):
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert_close(after, want.double(), atol=4 * EPS[torch.bfloat16] * 5, what=f"{name}, {turn}")
