"""prefill_attention: the reference against fp64 formulas, the Hopper kernel against fp64 (bounds below)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import ops
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import filled_pools, gather, normal, poison_allocator, poisoned, ragged_batch

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ROWS, KEYS = [1, 0, 130, 257, 64, 63, 65, 127, 129], [1, 3, 130, 257, 200, 63, 65, 500, 129]
DIMS = [(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 100},
    "window of 1": {"window": 1},
    "window, full": {"causal": False, "window": 65},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "tree": {"words": 9},
    "tree from a key on": {"words": 3, "mask_start": 7},
    "all": {"window": 90, "softcap": 5.0, "sinks": True, "words": 4, "mask_start": 0},
}


class Problem:
    """q, and keys both ways: contiguous with NaN behind the last one, and in pages with NaN in tails and unused pages."""

    def __init__(self, rows: list[int], keys: list[int], D: int = 128, Dv: int | None = None, *, H: int = 4, K: int = 2, dtype: torch.dtype
        = BF16, page: int = 64, extra: int = 0, seed: int = 0, **options: Any) -> None:  # fmt: skip
        self.rows, self.keys, self.options = rows, keys, dict(options)
        self.batch = ragged_batch(rows, keys, page, seed=seed)
        self.q = normal(sum(rows) + extra, H, D, dtype=dtype, seed=seed + 1)
        self.k_pool = filled_pools(self.batch, K, D, dtype, seed=seed + 2)[0]
        self.v_pool = filled_pools(self.batch, K, Dv or D, dtype, seed=seed + 1000)[1]
        self.k, self.v = (self.flat(pool) for pool in (self.k_pool, self.v_pool))
        self.sinks = normal(H, seed=seed + 3) if self.options.pop("sinks", False) else None
        words, start = self.options.pop("words", 0), self.options.pop("mask_start", None)
        self.mask = self.mask_starts = None
        if words:
            self.mask = torch.randint(-(2**31), 2**31 - 1, (self.q.shape[0], words), generator=torch.Generator().manual_seed(seed)).int()
        if start is not None:
            self.mask_starts = torch.full((len(rows),), start, dtype=torch.int32)
        self.scale = self.options.pop("scale", D**-0.5)

    def flat(self, pool: Tensor) -> Tensor:
        parts = [gather(pool, self.batch, b) for b in range(len(self.keys))]
        return torch.cat([*parts, poisoned(200, *pool.shape[2:], dtype=pool.dtype)])

    def call(self, device: str, paged: bool = False, **changed: Any) -> tuple[Tensor, Tensor]:
        starts = torch.tensor([0, *self.keys]).cumsum(0).int()
        keys = {"page_table": self.batch.page_table, "kv_lens": self.batch.kv_lens} if paged else {"kv_starts": starts}
        k, v = (self.k_pool, self.v_pool) if paged else (self.k, self.v)
        tensors = {"q": self.q, "k": k, "v": v, "q_starts": self.batch.q_starts, **keys, "sinks": self.sinks, "mask": self.mask,
                   "mask_starts": self.mask_starts} | changed  # fmt: skip
        moved = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in tensors.items()}
        return ops.prefill_attention(**moved, scale=self.scale, **self.options)

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """fp64: o, lse and sum of p |v|, the size that rounding errors of o are relative to."""
        o, lse, size = self.q.new_zeros((*self.q.shape[:2], self.v.shape[2]), dtype=torch.float64), [], []
        first_row = first_key = 0
        for b, (n, L) in enumerate(zip(self.rows, self.keys, strict=True)):
            keys = slice(first_key, first_key + L)
            q, k, v = (t.double() for t in (self.q[first_row : first_row + n], self.k[keys], self.v[keys]))
            group = q.shape[1] // k.shape[1]
            s = self.scale * torch.einsum("nhd,lhd->hnl", q, k.repeat_interleave(group, 1))
            cap = self.options.get("softcap")
            s = cap * torch.tanh(s / cap) if cap else s
            s = s.masked_fill(~self.seen(b, n, L, first_row), float("-inf"))
            all_s = s if self.sinks is None else torch.cat([s, self.sinks.double()[:, None, None].expand(-1, n, 1)], -1)
            one = torch.logsumexp(all_s, -1) if all_s.shape[-1] else torch.full(all_s.shape[:2], float("-inf"), dtype=torch.float64)
            p = torch.exp(s - torch.where(one.isinf(), 0.0, one)[..., None])
            wide = v.repeat_interleave(group, 1)
            o[first_row : first_row + n] = torch.einsum("hnl,lhd->nhd", p, wide)
            size.append(torch.einsum("hnl,lhd->nhd", p, wide.abs()).amax(-1))
            lse.append(one.transpose(0, 1))
            first_row, first_key = first_row + n, first_key + L
        rest = self.q.shape[0] - first_row
        lse.append(torch.full((rest, self.q.shape[1]), float("-inf"), dtype=torch.float64))
        size.append(torch.zeros(rest, self.q.shape[1], dtype=torch.float64))
        return o, torch.cat(lse), torch.cat(size)

    def seen(self, b: int, n: int, L: int, first_row: int) -> Tensor:
        at, key = torch.arange(L - n, L)[:, None], torch.arange(L)[None]
        seen = key <= at if self.options.get("causal", True) else key.expand(n, L) >= 0
        if self.options.get("window"):
            seen = seen & (key > at - self.options["window"])
        if self.mask is None:
            return seen
        start = L - n if self.mask_starts is None else int(self.mask_starts[b])
        for i in range(min(32 * self.mask.shape[1], max(L - start, 0))):
            if start + i >= 0:
                bit = self.mask[first_row : first_row + n, i // 32] >> (i % 32) & 1
                seen[:, start + i] &= bit.bool()
        return seen

    def check(self, got: tuple[Tensor, Tensor], what: str = "") -> None:
        """Weights and o are rounded once each to the dtype: 2 u sum p |v|. fp32 scores err by about (D + 8) 2^-24 sum |q k| scale, a few
        2^-24 times their size of up to 30, the hardware's 2^x by 2^-22: 1e-5 of the size at most, and as much of LSE."""
        o, lse, size = self.exact()
        assert_close(got[0], o, atol=(size * (2 * EPS[self.q.dtype] + 2e-5))[..., None], what=f"out {what}")
        assert_close(got[1], lse, atol=5e-5, what=f"lse {what}")


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_reference(name: str, paged: bool) -> None:
    problem = Problem([1, 0, 5, 17, 33], [1, 2, 5, 40, 33], 64, page=16, extra=3, **OPTIONS[name])
    problem.check(problem.call("cpu", paged))


def test_reference_of_fp8() -> None:
    problem = Problem([3, 5], [3, 20], 64, dtype=FP8, page=16)
    q_scale, k_scale, v_scale = normal(8, 4).abs(), normal(2, 2).abs(), torch.tensor([0.5])
    got = problem.call("cpu", q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    paged = problem.call("cpu", True, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    keys = torch.tensor([0] * 3 + [1] * 20 + [0] * 200)
    problem.q, problem.k, problem.v = (
        problem.q.float() * q_scale[..., None],
        problem.k.float() * k_scale[keys][..., None],
        problem.v.float() / 2,
    )
    want, lse, size = problem.exact()
    for out, one in (got, paged):
        assert out.dtype == BF16
        assert_close(out, want, atol=(size * (EPS[BF16] + 1e-5))[..., None])
        assert_close(one, lse, atol=1e-4)


def test_opcheck_and_compile() -> None:
    problem = Problem([3, 5], [3, 20], 64, page=16)
    starts = torch.tensor([0, 3, 23], dtype=torch.int32)
    args = (problem.q, problem.k, problem.v, problem.batch.q_starts, starts, None, None, 0.1)
    torch.library.opcheck(torch.ops.pyllm.prefill_attention.default, args)
    compiled = torch.compile(ops.prefill_attention, fullgraph=True, backend="aot_eager")
    kwargs = {"scale": 0.1, "kv_starts": starts}
    for got, want in zip(compiled(*args[:4], **kwargs), ops.prefill_attention(*args[:4], **kwargs), strict=True):
        assert_close(got, want)


KEY = torch.zeros(9, 2, 64, dtype=BF16)
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "q": ({"q": torch.zeros(3, 64, dtype=BF16)}, r"q has 2 dimensions, expected 3"),
    "D": ({"q": torch.zeros(3, 4, 80, dtype=BF16), "k": torch.zeros(9, 2, 80, dtype=BF16), "v": torch.zeros(9, 2, 80, dtype=BF16)},
          r"q has \(D, Dv\) \(80, 80\), expected"),
    "H": ({"q": torch.zeros(3, 3, 64, dtype=BF16)}, r"q has H=3 heads, expected a multiple of K=2"),
    "dtype": ({"k": KEY.half()}, r"k is (torch\.)?float16, expected (torch\.)?bfloat16 like q"),
    "no keys' bounds": ({"kv_starts": None}, r"kv_starts is missing"),
    "two bounds": ({"kv_lens": torch.zeros(1, dtype=torch.int32)}, r"kv_lens is given"),
    "starts": ({"q_starts": torch.zeros(2, dtype=torch.int64)}, r"q_starts is (torch\.)?int64, expected (torch\.)?int32"),
    "scale": ({"scale": 0.0}, r"scale is 0(\.0)?, expected finite and > 0"),
    "window": ({"window": 0}, r"window is 0, expected more than 0 \(or None\)"),
    "mask": ({"mask_starts": torch.zeros(1, dtype=torch.int32)}, r"mask_starts is given, expected it only with a mask"),
    "sinks": ({"sinks": torch.zeros(3)}, r"sinks (has shape \(3,\)|\.size\(0\) is 3), expected"),
    "k_scale": ({"k_scale": torch.ones(1)}, r"is given, expected"),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, device: str) -> None:
    starts = torch.tensor([0, 3], dtype=torch.int32)
    good = {
        "q": torch.zeros(3, 4, 64, dtype=BF16),
        "k": KEY,
        "v": KEY,
        "q_starts": starts,
        "kv_starts": torch.tensor([0, 9]).int(),
        "scale": 1.0,
    }
    change, message = ERRORS[case]
    args = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in (good | change).items()}
    with pytest.raises((ValueError, RuntimeError), match=f"prefill_attention: .*{message}"):
        ops.prefill_attention(**args)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, paged: bool) -> None:
    problem = Problem(ROWS, KEYS, extra=5, **OPTIONS[name])
    poison_allocator((problem.q.shape[0], 4, 128), BF16, "cuda")
    problem.check(problem.call("cuda", paged))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("D", "Dv"), DIMS)
def test_head_dims(D: int, Dv: int, dtype: torch.dtype) -> None:
    for heads, kv_heads in ((2, 2), (6, 2)):
        for options in ({}, {"causal": False}, {"window": 70, "softcap": 4.0, "words": 2}):
            problem = Problem(ROWS, KEYS, D, Dv, H=heads, K=kv_heads, dtype=dtype, **options)
            problem.check(problem.call("cuda"), f"{heads}/{kv_heads} {options}")
        if D == Dv:
            problem.check(problem.call("cuda", True), f"{heads}/{kv_heads} paged")


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_pages(page: int) -> None:
    edges = [page - 1, page, page + 1, 2 * page - 1, 127, 128, 129]
    for D in (64, 128, 256):
        problem = Problem([min(n, 140) for n in edges], edges, D, page=page)
        problem.check(problem.call("cuda", True), f"D={D}")


@pytest.mark.gpu
def test_rows_without_keys() -> None:
    problem = Problem([1, 9, 200], [1, 9, 200], extra=70, sinks=True)
    lens = torch.tensor([0, 0, 200], dtype=torch.int32)
    out, lse = problem.call("cuda", True, kv_lens=lens)
    assert torch.equal(out[:10].cpu(), torch.zeros(10, 4, 128, dtype=BF16))
    assert_close(lse[:10], problem.sinks.expand(10, 4), atol=1e-6)
    assert torch.equal(out[210:].cpu(), torch.zeros(70, 4, 128, dtype=BF16))
    assert torch.equal(lse[210:].cpu(), torch.full((70, 4), float("-inf")))
    problem.sinks = None
    assert torch.equal(problem.call("cuda", True, kv_lens=lens)[1][:10].cpu(), torch.full((10, 4), float("-inf")))


@pytest.mark.gpu
def test_many_sequences_and_long_ones() -> None:
    rows = [(37 * i) % 90 for i in range(100)] + [1000, 0, 3]
    problem = Problem(rows, [n + (13 * i) % 300 for i, n in enumerate(rows)], H=8, page=16)
    problem.check(problem.call("cuda", True))
    problem.check(problem.call("cuda"))


@pytest.mark.gpu
def test_strided_rows() -> None:
    problem = Problem(ROWS, KEYS)
    wide = poisoned(problem.q.shape[0], 10, 136, dtype=BF16)
    wide[:, 1:9:2, :128] = problem.q
    keys = poisoned(problem.k.shape[0], 5, 256, dtype=BF16)
    keys[:, 1:5:2, :128], keys[:, 1:5:2, 128:] = problem.k, problem.v
    wide, keys = wide.cuda(), keys.cuda()
    problem.check(problem.call("cuda", q=wide[:, 1:9:2, :128], k=keys[:, 1:5:2, :128], v=keys[:, 1:5:2, 128:]))


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_twice_the_same_and_alone_the_same(paged: bool) -> None:
    problem = Problem([300, 77, 513], [400, 77, 513], H=8)
    first, again = problem.call("cuda", paged), problem.call("cuda", paged)
    for a, b in zip(first, again, strict=True):
        assert_same(a, b)
    alone = Problem([300, 77, 513], [400, 77, 513], H=8)
    index = (torch.tensor([0, 77]).int(), torch.tensor([0, 77]).int())
    one = alone.call("cuda", q=alone.q[300:377], k=alone.k[400:477], v=alone.v[400:477], q_starts=index[0], kv_starts=index[1])
    assert_same(one[0], first[0][300:377])
    assert_same(one[1], first[1][300:377])


@pytest.mark.gpu
@pytest.mark.parametrize("jump", [20, 60, 600])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_scores_far_above_those_of_the_last_keys(D: int, dtype: torch.dtype, causal: bool, jump: int) -> None:
    """The kernel goes from the last key to the first and weighs a row's keys against the largest score that it saw first. Some early keys
    score `jump` more: 2^29, 2^87 and 2^866 times the weight, within what bf16 bears without a new look, beyond it, and beyond fp32."""
    problem = Problem([1, 65, 700], [1, 200, 700], D, dtype=dtype, causal=causal)
    first_row = first_key = 0
    for n, L in zip(problem.rows, problem.keys, strict=True):
        for part in (0.05, 0.4, 0.8):
            row = problem.q[first_row + int(part * n), 0].float()
            problem.k[first_key + int(part * L) // 2, 0] = (row * (jump * D**0.5 / row.square().sum())).to(dtype)
        first_row, first_key = first_row + n, first_key + L
    got = problem.call("cuda")
    o, lse, size = problem.exact()
    # fp32 sums of D products err by (D + 8) 2^-24 of the sum of their sizes, at most |q| |k| scale, about 1.5 jump; twice that in a weight.
    error = (D + 8) * 2.0**-24 * 1.5 * jump
    assert_close(got[0], o, atol=(size * (2 * EPS[dtype] + 2e-5 + 2 * error))[..., None], what="out")
    assert_close(got[1], lse, atol=5e-5 + error, what="lse")


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_row_does_not_change_with_its_neighbours(D: int) -> None:
    """Rows whose scores jump, or are NaN, make their warpgroup look again; the others must get the same bits."""
    problem = Problem([700, 130], [900, 130], D)
    quiet = problem.call("cuda")
    problem.q[3::37] *= 100
    problem.q[20::101] = float("nan")
    loud = problem.call("cuda")
    same = torch.ones(830, dtype=torch.bool)
    same[3::37], same[20::101] = False, False
    for a, b in zip(quiet, loud, strict=True):
        assert_same(a.cpu()[same], b.cpu()[same])
    assert loud[0].cpu()[20::101].isnan().all() and loud[1].cpu()[20::101].isnan().all()


@pytest.mark.gpu
def test_graph_replay_with_changed_lengths() -> None:
    problem = Problem([40, 200, 16], [90, 200, 16])
    static = {"q_starts": problem.batch.q_starts.cuda(), "kv_lens": problem.batch.kv_lens.cuda()}
    tensors = [t.cuda() for t in (problem.q, problem.k_pool.nan_to_num(), problem.v_pool.nan_to_num(), problem.batch.page_table)]

    def run() -> tuple[Tensor, Tensor]:
        return ops.prefill_attention(*tensors[:3], static["q_starts"], page_table=tensors[3], kv_lens=static["kv_lens"], scale=0.1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = run()
        got = run()
    for starts, lens in (([0, 40, 240, 256], [90, 200, 16]), ([0, 1, 2, 250], [64, 130, 250]), ([0, 0, 0, 10], [5, 7, 10])):
        static["q_starts"].copy_(torch.tensor(starts, dtype=torch.int32))
        static["kv_lens"].copy_(torch.tensor([min(n, 64 * problem.batch.page_table.shape[1]) for n in lens], dtype=torch.int32))
        static["kv_lens"].clamp_(max=torch.tensor([128, 256, 64], dtype=torch.int32, device="cuda"))
        graph.replay()
        for a, b, c in zip(first, got, run(), strict=True):
            assert_same(a, c)
            assert_same(b, c)


@pytest.mark.gpu
@pytest.mark.large
def test_offsets_beyond_2_31_elements() -> None:
    tokens = 600_000
    k = torch.empty(tokens, 32, 128, dtype=BF16, device="cuda").normal_()
    q = torch.empty(140, 32, 128, dtype=BF16, device="cuda").normal_()
    q_starts, kv_starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 140], [tokens - 300, tokens]))
    got = ops.prefill_attention(q, k, k, q_starts, kv_starts=kv_starts, scale=0.1)
    want = ops.prefill_attention(q, k[-300:].clone(), k[-300:].clone(), q_starts, kv_starts=kv_starts - kv_starts[0], scale=0.1)
    assert_same(got[0], want[0])
    pages = k.view(-1, 64, 32, 128)
    table = torch.arange(pages.shape[0] - 5, pages.shape[0], dtype=torch.int32, device="cuda")[None]
    lens = torch.tensor([320], dtype=torch.int32, device="cuda")
    paged = ops.prefill_attention(q, pages, pages, q_starts, page_table=table, kv_lens=lens, scale=0.1)
    flat = ops.prefill_attention(q, k[-320:].clone(), k[-320:].clone(), q_starts, kv_starts=torch.tensor([0, 320]).int().cuda(), scale=0.1)
    assert_same(paged[0], flat[0])
