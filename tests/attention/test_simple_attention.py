"""simple_attention: the reference against a formula in fp64 and against paged_attention; the kernel, built ahead of time and compiled at
run time, against the reference. Unused slots, pages and table tails are poison in all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import ops
from pyllm.jit.compiler import unavailable
from pyllm.jit.variant import PLAIN
from tests.attention.simple_cases import Step, compare, make, random_mask
from tests.support.compare import assert_close, assert_same
from tests.support.generate import normal, poison_allocator

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LENGTHS = [1, 0, 63, 64, 65, 127, 129, 200, 16, 17, 31, 32, 33]
CHUNKS = [1, 0, 63, 1, 64, 100, 2, 200, 9, 0, 31, 3, 33]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 40},
    "window-1": {"window": 1},
    "full-window": {"causal": False, "window": 5},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "tree": {"mask": 2},
    "mask": {"mask": 3, "mask_starts": True, "causal": False},
    "all": {"window": 70, "softcap": 2.0, "sinks": True, "mask": 1, "mask_starts": True},
}
ROUTES = [
    pytest.param(None, id="built"),
    pytest.param(PLAIN, id="compiled", marks=pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))),
]


def options_of(case: str, step: Step) -> dict[str, Any]:
    options = dict(OPTIONS[case])
    if options.get("sinks"):
        options["sinks"] = normal(step.q.shape[1])
    if options.get("mask"):
        options["mask"] = random_mask(step, options["mask"])
    if options.get("mask_starts"):
        options["mask_starts"] = torch.randint(-40, 150, (len(step.q_lens),), dtype=torch.int32)
    return options


def formula(step: Step, b: int, scale: float, causal: bool = True, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None,
            mask: Tensor | None = None, mask_starts: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence of a step with contiguous keys in fp64, key by key."""
    rows = slice(int(step.q_starts[b]), int(step.q_starts[b + 1]))
    keys = slice(int(step.where["kv_starts"][b]), int(step.where["kv_starts"][b + 1]))
    q, k, v = step.q[rows].double(), step.k[keys].double(), step.v[keys].double()
    n, L, group = len(q), len(k), q.shape[1] // k.shape[1]
    out, lse = torch.zeros(n, q.shape[1], v.shape[2], dtype=torch.float64), torch.full((n, q.shape[1]), float("-inf"), dtype=torch.float64)
    for j in range(n):
        p = L - n + j
        for h in range(q.shape[1]):
            s = scale * (k[:, h // group] @ q[j, h])
            s = softcap * torch.tanh(s / softcap) if softcap else s
            for key in range(L):
                bit = key - (L - n if mask_starts is None else int(mask_starts[b]))
                off = mask is not None and 0 <= bit < 32 * mask.shape[1] and not int(mask[rows.start + j, bit // 32]) >> bit % 32 & 1
                if off or (causal and key > p) or (window and key <= p - window):
                    s[key] = float("-inf")
            every = s if sinks is None else torch.cat([s, sinks[h : h + 1].double()])
            if (every > float("-inf")).any():
                lse[j, h] = torch.logsumexp(every, 0)
                out[j, h] = torch.exp(s - lse[j, h]) @ v[:, h // group]
    return out, lse


@pytest.mark.parametrize("case", OPTIONS)
def test_reference_is_the_formula(case: str) -> None:
    step = make([3, 0, 5, 1], [3, 2, 40, 7], 4, 2, 8, dtype=torch.float32, Dv=16, spare=2)
    options = options_of(case, step)
    got, lse = step.call(**options)
    for b in range(4):
        rows = slice(int(step.q_starts[b]), int(step.q_starts[b + 1]))
        want = formula(step, b, 8**-0.5, **{n: v for n, v in options.items() if n != "max_q"})
        assert_close(got[rows], want[0], atol=1e-5, what="out")  # fp32: 50 terms of at most 4 at 2^-24
        assert_close(lse[rows], want[1], atol=1e-5, what="lse")
    assert_same(got[-2:], torch.zeros_like(got[-2:]))
    assert_same(lse[-2:], torch.full_like(lse[-2:], float("-inf")))


@pytest.mark.parametrize("sinks", [False, True])
def test_reference_is_that_of_paged_attention(sinks: bool) -> None:
    step = make(CHUNKS, LENGTHS, 6, 2, 16, P=16, spare=1)
    logits = normal(6) if sinks else None
    got = step.call(scale=0.2, window=30, softcap=4.0, sinks=logits)
    tables = (step.where["page_table"], step.q_starts, step.where["kv_lens"])
    want = ops.paged_attention(step.q, step.k, step.v, *tables, scale=0.2, window=30, softcap=4.0, sinks=logits)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, rtol=2.0**-8, atol=1e-5)  # one rounding to bf16 of nearly equal numbers


def test_opcheck_and_compile() -> None:
    step = make([1, 20, 0], [5, 40, 3], 4, 2, 16, P=16)
    k, v = step.k.nan_to_num(), step.v.nan_to_num()
    mask, table, lens = random_mask(step, 1), step.where["page_table"], step.where["kv_lens"]
    args = (step.q, k, v, step.q_starts, None, lens, table, 0.2, True, 5, 2.0, normal(4), mask, None, None, None, 20)
    torch.library.opcheck(torch.ops.pyllm.simple_attention.default, args)
    compiled = torch.compile(ops.simple_attention, fullgraph=True, backend="aot_eager")
    where = {"scale": 0.2, "page_table": table, "kv_lens": lens}
    assert_same(compiled(*args[:4], **where)[0], ops.simple_attention(*args[:4], **where)[0])


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


FP8_KEYS = {"k": zeros(9, 2, 64, dtype=FP8), "v": zeros(9, 2, 64, dtype=FP8)}
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q dims": ({"q": zeros(3, 64)}, r"q has 2 dimensions, expected 3"),
    "q dtype": ({"q": zeros(3, 4, 64, dtype=torch.float64)}, r"q is .*, expected bfloat16.* or float"),
    "k dtype": ({"k": zeros(9, 2, 64, dtype=FP16)}, r"k is .*float16, expected .*bfloat16 like q or float8_e4m3fn"),
    "v dtype": ({"v": zeros(9, 2, 64, dtype=FP8)}, r"v is .*float8_e4m3fn, expected .*bfloat16 like k"),
    "v_scale": ({**FP8_KEYS, "v_scale": zeros(3, dtype=torch.float32)}, r"v_scale has .*, expected \[1\] or \[K=2\]"),
    "scale dtype": ({**FP8_KEYS, "k_scale": zeros(1)}, r"k_scale is .*bfloat16, expected float32"),
    "k dims": ({"k": zeros(9, 64)}, r"k has 2 dimensions, expected 3"),
    "D": ({"k": zeros(9, 2, 128)}, r"k \.size\(2\) is 128, expected D=64"),
    "v": ({"v": zeros(8, 2, 64)}, r"v .*8.*expected "),
    "H": ({"q": zeros(3, 3, 64)}, r"q has H=3 heads, expected a multiple of K=2"),
    "no keys": ({"kv_starts": None}, r"kv_starts is missing, expected it exactly without a page_table"),
    "lens": ({"kv_lens": ints(9)}, r"kv_lens is given, expected it with a page_table and only then"),
    "starts": ({"kv_starts": ints(0, 9, 9)}, r"kv_starts .*3.*expected "),
    "starts dtype": ({"q_starts": ints(0, 3).long()}, r"q_starts is .*int64, expected int32"),
    "sinks": ({"sinks": zeros(4)}, r"sinks is .*bfloat16, expected float32"),
    "mask": ({"mask": ints(1, 2, 3)}, r"mask has .*, expected "),
    "mask dtype": ({"mask": zeros(3, 1, dtype=torch.uint8)}, r"mask is .*uint8, expected int32"),
    "mask_starts": ({"mask_starts": ints(0)}, r"mask_starts is given, expected it only with a mask"),
    "window": ({"window": -1}, r"window is -1, expected more than 0"),
    "softcap": ({"softcap": -1.0}, r"softcap is -1\.0, expected more than 0"),
    "max_q": ({"max_q": 0}, r"max_q is 0, expected more than 0"),
}
SEEN_IN_PYTHON = ("window", "softcap", "max_q")


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, device: str) -> None:
    change, message = ERRORS[case]
    args: dict[str, Any] = {"q": zeros(3, 4, 64), "k": zeros(9, 2, 64), "v": zeros(9, 2, 64), "q_starts": ints(0, 3)}
    args |= {"kv_starts": ints(0, 9), "scale": 0.2} | change
    moved = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in args.items()}
    native = device == "cuda" and case not in SEEN_IN_PYTHON
    with pytest.raises(RuntimeError if native else ValueError, match=f"simple_attention: {message}"):
        ops.simple_attention(**moved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_q": 2}, "max_q is 2, expected at least the 3 rows of sequence 0"),
        ({"q_starts": ints(0, 4)}, r"q_starts is \[0, 4\], expected rising numbers from 0 to T=3"),
        ({"kv_starts": ints(0, 2)}, "q_starts gives sequence 0 3 rows, expected at most its 2 keys"),
        ({"kv_starts": ints(5, 2)}, "kv_starts gives sequence 0 -3 keys, expected >= 0"),
    ],
)
def test_numbers_that_only_the_reference_sees(change: dict[str, Any], message: str) -> None:
    args: dict[str, Any] = {"q": zeros(3, 4, 64), "k": zeros(9, 2, 64), "v": zeros(9, 2, 64), "q_starts": ints(0, 3)}
    with pytest.raises(ValueError, match=message):
        ops.simple_attention(**args | {"kv_starts": ints(0, 9), "scale": 0.2} | change)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("P", [0, 1, 16, 64])
def test_prefill(P: int, case: str, route: Any) -> None:
    step = make(CHUNKS, LENGTHS, 8, 2, 64, P=P, spare=3)
    options = options_of(case, step)
    poison_allocator(step.q.shape, BF16, "cuda")
    compare(step.call("cuda", route, **options), step, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("max_q", [None, 1, 4])
def test_head_dims(max_q: int | None, D: int, dtype: torch.dtype, route: Any) -> None:
    """max_q=1 with a group of 4: the form for few rows, over splits of the keys."""
    lengths = [*LENGTHS, 700, 1500]
    step = make([min(max_q or L, L) for L in lengths], lengths, 8, 2, D, P=16, dtype=dtype, spare=2)
    compare(step.call("cuda", route, max_q=max_q), step)


def test_reference_with_fp8_keys() -> None:
    """value = stored * scale, of each KV head."""
    step = make([3, 1], [40, 17], 4, 2, 16, P=16, cache=FP8, dtype=torch.float32)
    scales = {"k_scale": torch.tensor([0.5, 1.25]), "v_scale": torch.tensor([3.0])}
    for got, want in zip(step.call(**scales), step.wide(**scales).call(), strict=True):
        assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("max_q", [None, 1])
def test_fp8_keys(max_q: int | None, D: int, dtype: torch.dtype, route: Any) -> None:
    lengths = [*LENGTHS, 700]
    step = make([min(max_q or L, L) for L in lengths], lengths, 8, 2, D, P=16 if D != 128 else 0, dtype=dtype, cache=FP8, spare=2)
    scales = {"k_scale": torch.tensor([0.5, 1.25]), "v_scale": torch.tensor([3.0])}
    for options in (scales, {}, scales | {"sinks": normal(8), "softcap": 4.0}):
        compare(step.call("cuda", route, max_q=max_q, **options), step, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
def test_every_fp8_value(route: Any) -> None:
    """One key alone: the result is its value, widened exactly (but for the sign of 0, which a sum loses); a NaN stays a NaN."""
    v = torch.arange(256, dtype=torch.uint8).view(FP8).view(4, 1, 64)
    step = Step(normal(4, 1, 64, dtype=FP16), torch.ones(4, 1, 64).to(FP8), v, ints(0, 1, 2, 3, 4), {"kv_starts": ints(0, 1, 2, 3, 4)})
    assert_same(step.call("cuda", route)[0].nan_to_num(1000), (v.half() + 0.0).nan_to_num(1000).cuda())


@pytest.mark.gpu
@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize(("D", "Dv"), [(8, 8), (40, 40), (72, 72), (80, 80), (112, 112), (160, 160), (192, 192), (192, 128), (248, 248)])
@pytest.mark.parametrize("max_q", [None, 1])
def test_head_dims_compiled_at_run_time(D: int, Dv: int, max_q: int | None) -> None:
    step = make([min(max_q or L, L) for L in LENGTHS], LENGTHS, 4, 2, D, Dv=Dv, P=16, spare=2)
    compare(step.call("cuda", max_q=max_q), step)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("H", "K"), [(1, 1), (3, 1), (9, 3), (16, 1), (20, 1), (40, 1)])
@pytest.mark.parametrize("n", [1, 3])
def test_groups(n: int, H: int, K: int, route: Any) -> None:
    step = make([n] * len(LENGTHS), LENGTHS, H, K, 64, P=32)
    for case in ("causal", "all"):
        options = options_of(case, step) | {"max_q": n}
        compare(step.call("cuda", route, **options), step, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", ["causal", "sinks", "window", "tree"])
def test_splits(case: str, route: Any) -> None:
    """One long sequence among short ones, more splits than the short ones have tiles; two runs have the same bits."""
    lengths = [4000, 1, 0, 70]
    step = make([2, 1, 0, 2], lengths, 8, 2, 128, P=64, spare=1)
    options = options_of(case, step) | {"max_q": 2}
    poison_allocator(step.q.shape, BF16, "cuda")
    got = step.call("cuda", route, **options)
    compare(got, step, **options)
    for one, two in zip(got, step.call("cuda", route, **options), strict=True):
        assert_same(one, two, "two runs")


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
def test_many_sequences(route: Any) -> None:
    lengths = [1 + 7 * i % 90 for i in range(300)]
    step = make([1 + i % min(L, 5) for i, L in enumerate(lengths)], lengths, 4, 4, 64, P=16)
    compare(step.call("cuda", route), step)
    compare(step.call("cuda", route, max_q=5), step)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
def test_strided_rows_and_pages(route: Any) -> None:
    """q as a slice of qkv, K and V interleaved page by page."""
    step = make(CHUNKS, LENGTHS, 8, 2, 128, P=16)
    both = torch.stack([step.k, step.v], 1)
    wide = torch.full((step.q.shape[0], 14, 128), float("nan"), dtype=BF16)
    wide[:, 2:10] = step.q
    strided = replace(step, q=wide.cuda()[:, 2:10], k=both.cuda()[:, 0], v=both.cuda()[:, 1])
    assert not strided.q.is_contiguous() and not strided.k.is_contiguous()
    compare(strided.call("cuda", route), step)


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("max_q", [None, 1])
def test_graph_replay_with_changed_lengths(max_q: int | None, route: Any) -> None:
    step = make([1] * 5, [700, 900, 64, 1, 333], 8, 2, 128, P=16, spare=2)
    step = replace(step, k=step.k.nan_to_num(), v=step.v.nan_to_num())
    moved = replace(
        step, **{n: getattr(step, n).cuda() for n in ("q", "k", "v", "q_starts")}, where={n: t.cuda() for n, t in step.where.items()}
    )
    moved.call("cuda", route, max_q=max_q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = moved.call("cuda", route, max_q=max_q)
    for lens in ([700, 900, 64, 1, 333], [1, 1, 1, 1, 1], [0, 900, 0, 0, 0], [699, 17, 63, 0, 65]):
        moved.where["kv_lens"].copy_(ints(*lens))
        graph.replay()
        compare(got, replace(step, where=step.where | {"kv_lens": ints(*lens)}))


@pytest.mark.gpu
@pytest.mark.parametrize("route", ROUTES)
def test_in_a_chain_of_dependent_launches(route: Any) -> None:
    """Each call reads what the one before wrote, with launches that overlap; the splits' second kernel is among them."""
    step = make([1] * 3, [900, 64, 333], 8, 2, 128, P=64)
    q, k, v, starts = (t.cuda() for t in (step.q, step.k, step.v, step.q_starts))
    where = {n: t.cuda() for n, t in step.where.items()}

    def chain(wait: bool) -> Tensor:
        x = q
        for _ in range(20):
            x, _ = replace(step, q=x, k=k, v=v, q_starts=starts, where=where).call("cuda", route, max_q=1, scale=0.1)
            x = ops.softcap(x.view(3, -1) * 30, 3.0).view_as(q)
            if wait:
                torch.cuda.synchronize()
        return x

    assert_same(chain(False), chain(True))


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("route", ROUTES)
def test_offsets_beyond_2_to_the_31(route: Any) -> None:
    pages = (1 << 31) // (64 * 8 * 128) + 40
    cache = torch.empty(pages, 64, 8, 128, dtype=BF16, device="cuda")
    cache[pages - 12 :] = normal(12, 64, 8, 128, dtype=BF16).cuda()
    small = cache[pages - 12 :].cpu()
    table = torch.arange(12, dtype=torch.int32).view(1, 12)
    step = Step(normal(1, 16, 128, dtype=BF16), small, small, ints(0, 1), {"page_table": table, "kv_lens": ints(12 * 64 - 3)})
    far = replace(step, k=cache, v=cache, where=step.where | {"page_table": table + (pages - 12)})
    compare(far.call("cuda", route), step)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("max_q", [None, 1])
def test_rows_of_a_padded_sequence_see_nothing(max_q: int | None, sinks: bool, device: str) -> None:
    """A row and no keys: nothing is read, and the row's sink is all there is."""
    cache, table = torch.full((1, 16, 1, 64), float("nan"), dtype=BF16), torch.full((2, 1), 2**31 - 1, dtype=torch.int32)
    step = Step(normal(3, 2, 64, dtype=BF16), cache, cache, ints(0, 1, 2), {"page_table": table, "kv_lens": ints(0, 0)})
    logits = normal(2) if sinks else None
    out, lse = step.call(device, max_q=max_q, sinks=logits, window=4)
    assert_same(out, torch.zeros_like(out))
    assert_close(lse[:2], torch.full((2, 2), float("-inf")) if logits is None else logits.expand(2, 2), rtol=1e-6)
    assert_same(lse[2:], torch.full_like(lse[2:], float("-inf")))


@pytest.mark.gpu
@pytest.mark.parametrize(("D", "P", "cache"), [(128, 8, BF16), (96, 16, FP8)])
def test_paged_attention_calls_it(D: int, P: int, cache: torch.dtype) -> None:
    """For what the kernels of Hopper do not serve: small pages, e4m3 caches of other head dims."""
    step = make(CHUNKS, LENGTHS, 8, 2, D, P=P, cache=cache)
    scales = {"k_scale": torch.tensor([0.5, 1.25]).cuda(), "v_scale": torch.tensor([3.0]).cuda()}
    q, k, v, starts, table, lens = (
        t.cuda() for t in (step.q, step.k, step.v, step.q_starts, step.where["page_table"], step.where["kv_lens"])
    )
    got = ops.paged_attention(q, k, v, table, starts, lens, scale=0.1, **scales)
    want = ops.simple_attention(q, k, v, starts, page_table=table, kv_lens=lens, scale=0.1, **scales)
    for g, w in zip(got, want, strict=True):
        assert_same(g, w)


@pytest.mark.gpu
def test_empty() -> None:
    step = make([], [], 4, 2, 64)
    out, lse = step.call("cuda")
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    step = make([], [], 4, 2, 64, spare=5)
    out, lse = step.call("cuda")
    assert_same(out, torch.zeros_like(out))
    assert_same(lse, torch.full_like(lse, float("-inf")))
