"""prefill_attention on e4m3 q, k, v: the kernel against the reference in fp32 on the same stored values times their scales.

Unused slots, page tails, table tails and spare pages are poison in all of the paged cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm.ops.prefill import prefill_attention
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import RaggedBatch, filled_pools, gather, normal, poison, poison_allocator, ragged_batch

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SUM = 2.0**-13  # a wgmma over e4m3 adds 32 products to its sum with about 14 bits: relative to the largest of them, cut off
NEW, KEYS = (1, 0, 127, 128, 129, 300, 5), (1, 5, 127, 200, 300, 1000, 64)  # rows and keys: tile and page, one less, one more


@dataclass
class Case:
    """Contiguous keys beside the same keys in pages."""

    batch: RaggedBatch
    q: Tensor
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor

    @property
    def kv_starts(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int32), self.batch.kv_lens.cumsum(0).int()])

    def keys(self, paged: bool) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        if paged:
            return (self.k_pages, self.v_pages), {"page_table": self.batch.page_table, "kv_lens": self.batch.kv_lens}
        return (self.k, self.v), {"kv_starts": self.kv_starts}


def make(new: tuple[int, ...], keys: tuple[int, ...], H: int, K: int, D: int, P: int = 64, spare: int = 0) -> Case:
    batch = ragged_batch(new, keys, page_size=P)
    pages = filled_pools(batch, K, D, FP8)
    k, v = (torch.cat([gather(pool, batch, b) for b in range(batch.B)]) for pool in pages)
    return Case(batch, normal(batch.T + spare, H, D, dtype=FP8), k, v, *pages)


def move(x: Any, device: str) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def call(case: Case, paged: bool = False, device: str = "cuda", **options: Any) -> tuple[Tensor, Tensor]:
    (k, v), where = case.keys(paged)
    options = {"scale": case.q.shape[2] ** -0.5} | where | options
    moved = {name: move(x, device) for name, x in options.items()}
    return prefill_attention(case.q.to(device), k.to(device), v.to(device), case.batch.q_starts.to(device), **moved)


def times(x: Tensor, scale: Tensor | None, starts: Tensor | None = None) -> Tensor:
    """Stored values times their scales; [B, K] scales belong to the sequences' own keys."""
    if scale is None or scale.dim() == 1:
        return x.float() if scale is None else x.float() * scale[:, None]
    if starts is None:
        return x.float() * scale[:, :, None]
    return x.float() * scale.repeat_interleave(starts.diff(), 0)[:, :, None]


def want(case: Case, **options: Any) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """(o, lse, sum of p |v|, largest |v|, largest sum of |q k| times scale) in fp32."""
    q_scale = options.pop("q_scale", None)
    q = times(case.q, q_scale)
    k, v = (times(x, options.pop(name, None), case.kv_starts) for name, x in (("k_scale", case.k), ("v_scale", case.v)))
    options = {"scale": q.shape[2] ** -0.5, "kv_starts": case.kv_starts} | options
    out, lse = prefill_attention(q, k, v, case.batch.q_starts, **options)
    size, _ = prefill_attention(q, k, v.abs(), case.batch.q_starts, **options)
    if not k.numel():
        return out, lse, size, 0.0, 0.0
    reach = options["scale"] * q.norm(dim=-1).max() * k.norm(dim=-1).max()
    return out, lse, size, v.abs().max().item(), reach.item()


def compare(got: tuple[Tensor, Tensor], case: Case, **options: Any) -> None:
    """Scores: D / 32 steps, each cut off at SUM of the sum so far (at most reach); p errs by that much relatively.
    Weights: half a unit of e4m3, 2^-4 relative, or, below 2^-14 of the row's largest weight (2^8 as stored, smallest normal 2^-6), 2^-10
    of 2^8 absolutely. A tile's 128 keys are 4 steps of products with v. The result is rounded to bf16 once."""
    out, lse, size, largest, reach = want(case, **options)
    steps = case.q.shape[2] / 32 + 1
    inside = steps * SUM * reach
    small = int(case.batch.kv_lens.max()) * 2.0**-18 * largest
    limit = size.double() * (EPS[FP8] + inside + 5 * SUM) + out.double().abs() * EPS[BF16] + small + 1e-6
    assert_close(got[0], out, atol=limit, what="out")
    assert_close(got[1], lse, atol=inside + 1e-4, what="lse")
    if case.batch.T:
        a, b = got[0].double().cpu().flatten(), out.double().flatten()
        assert (a @ b / (a.norm() * b.norm())).item() > 0.999


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "window": {"window": 100},
    "window-1": {"window": 1},
    "window-full": {"window": 130, "causal": False},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "mask": {"mask": 5},
    "mask-starts": {"mask": 9, "mask_starts": True, "causal": False},
    "all": {"window": 70, "softcap": 2.0, "sinks": True, "mask": 2},
}


def filled(options: dict[str, Any], case: Case) -> dict[str, Any]:
    options = dict(options)
    if options.get("sinks"):
        options["sinks"] = normal(case.q.shape[1])
    if words := options.get("mask"):
        options["mask"] = torch.randint(-(2**31), 2**31 - 1, (case.q.shape[0], words), dtype=torch.int64).int()
    if options.get("mask_starts"):
        options["mask_starts"] = torch.tensor([7 * b for b in range(case.batch.B)], dtype=torch.int32)
    return options


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("P", [0, 16, 64, 128, 256])
def test_kernel(P: int, D: int) -> None:
    """P = 0: contiguous keys."""
    case = make(NEW, KEYS, 8, 2, D, P or 64, spare=3)
    poison_allocator(case.q.shape, BF16, "cuda")
    got = call(case, paged=P > 0)
    compare(got, case)
    assert_same(got[0][-3:], torch.zeros_like(got[0][-3:]), "rows of no sequence")
    assert_same(got[1][-3:], torch.full_like(got[1][-3:], float("-inf")), "lse of rows of no sequence")


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, paged: bool, D: int) -> None:
    case = make(NEW, KEYS, 6, 2, D)
    options = filled(OPTIONS[name], case)
    compare(call(case, paged, **options), case, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("H", "K"), [(1, 1), (3, 1), (5, 5), (16, 1)])
def test_groups(H: int, K: int) -> None:
    case = make((140, 3), (300, 3), H, K, 128)
    compare(call(case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(0,), (0, 0, 7), (1,) * 70, tuple(1 + 37 * i % 200 for i in range(75))], ids=len)
def test_batches(lengths: tuple[int, ...]) -> None:
    case = make(lengths, lengths, 2, 1, 128, spare=2)
    compare(call(case), case)
    compare(call(case, paged=True), case)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["one", "head", "sequence"])
def test_scales(shape: str) -> None:
    case = make((200, 30), (300, 500), 8, 2, 128)
    sizes = {"one": ((1,), (1,)), "head": ((230, 8), (2,)), "sequence": ((230, 8), (2, 2))}[shape]
    options = {
        name: torch.rand(size) + 0.25 for name, size in zip(("q_scale", "k_scale", "v_scale"), (sizes[0], sizes[1], sizes[1]), strict=True)
    }
    compare(call(case, **options), case, **options)
    compare(call(case, paged=True, **options), case, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("s", [0.25, 4.0])
def test_scale_invariance(s: float) -> None:
    """Powers of two move between the scales of q and k without a trace, and through that of v into the result exactly."""
    case = make((200, 30), (300, 500), 4, 2, 128)
    q_scale, k_scale, v_scale = torch.rand(230, 4) + 0.5, torch.rand(2) + 0.5, torch.rand(2) + 0.5
    one = call(case, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    two = call(case, q_scale=q_scale * s, k_scale=k_scale / s, v_scale=v_scale * s)
    assert_same(two[0], one[0] * s, "out")
    assert_same(two[1], one[1], "lse")


@pytest.mark.gpu
def test_alone_in_a_batch_twice_and_paged_are_the_same_bits() -> None:
    case = make((300, 1, 129), (700, 40, 129), 4, 2, 128, 16)
    got = call(case)
    for g, again, paged in zip(got, call(case), call(case, paged=True), strict=True):
        assert_same(again, g, "two runs")
        assert_same(paged, g, "pages")
    q_at, k_at = case.batch.q_starts.tolist(), case.kv_starts.tolist()
    for b in range(3):
        rows, keys = slice(q_at[b], q_at[b + 1]), slice(k_at[b], k_at[b + 1])
        starts = [torch.tensor([0, at.stop - at.start], dtype=torch.int32, device="cuda") for at in (rows, keys)]
        parts = (case.q[rows].cuda(), case.k[keys].cuda(), case.v[keys].cuda())
        alone = prefill_attention(*parts, starts[0], kv_starts=starts[1], scale=128**-0.5)
        for g, one in zip(got, alone, strict=True):
            assert_same(one, g[rows], f"sequence {b}")


@pytest.mark.gpu
def test_weights_are_rounded_once() -> None:
    """Against the same rounding in torch: weights as e4m3 multiples of 2^8 of the row's largest. The kernel rounds relative to the largest
    so far, which errs as much on the average, so the rms errors agree within a quarter."""
    case = make((512,), (2048,), 4, 1, 128)
    out, lse, _, _, _ = want(case)
    s = torch.einsum("thd,sd->hts", case.q.float(), case.k[:, 0].float()) * 128**-0.5
    s = s.masked_fill(torch.arange(2048)[None] > torch.arange(1536, 2048)[:, None], float("-inf"))
    p = (torch.exp(s - s.amax(-1, keepdim=True)) * 256).to(FP8).float() / 256
    emulated = torch.einsum("hts,sd->thd", p, case.v[:, 0].float()) / torch.exp(lse[..., None] - s.amax(-1).T[..., None])
    ours = (call(case)[0].float().cpu() - out).pow(2).mean().sqrt()
    theirs = (emulated.to(BF16).float() - out).pow(2).mean().sqrt()
    assert ours <= 1.25 * theirs, f"rms error {ours:.3g}, emulation {theirs:.3g}"


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_128k_keys(D: int, shift: float) -> None:
    """fp64 on the GPU. With values around 1 a sum that loses its low bits drifts: 4096 steps at 2^-14 would lose a quarter.
    Per tile 4 steps cut off SUM each; the weights' roundings are independent, so their sum stays within 6 of its standard deviations
    (2^-4 / sqrt(3) of p |v| each); then bf16."""
    L, n = 1 << 17, 70
    q, k = (normal(rows, 1, D, dtype=FP8).cuda() for rows in (n, L))
    v = (normal(L, 1, D) * 0.5 + shift).to(FP8).cuda()
    starts = [torch.tensor([0, x], dtype=torch.int32, device="cuda") for x in (n, L)]
    got, lse = prefill_attention(q, k, v, starts[0], kv_starts=starts[1], scale=D**-0.5)
    s = q[:, 0].double() @ k[:, 0].double().T * D**-0.5
    s = s.masked_fill(torch.arange(L, device="cuda")[None] > torch.arange(L - n, L, device="cuda")[:, None], float("-inf"))
    p, wide = torch.softmax(s, -1), v[:, 0].double()
    out, noise = p @ wide, (p.square() @ wide.square()).sqrt()
    inside = (D / 32 + 1) * SUM * D**-0.5 * (q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max()).item()
    limit = (p @ wide.abs()) * 5 * SUM + 6 * (EPS[FP8] / 3**0.5 + inside) * noise + out.abs() * EPS[BF16] + 1e-6
    assert_close(got[:, 0], out, atol=limit.cpu(), what="out")
    assert_close(lse[:, 0], torch.logsumexp(s, -1), atol=inside + 1e-4, what="lse")
    cosine = torch.nn.functional.cosine_similarity(got[:, 0].double().flatten(), out.flatten(), dim=0)
    assert cosine > 0.999, f"cosine {cosine:.5f}"


@pytest.mark.gpu
def test_strided_rows_and_pages() -> None:
    """q, k, v as slices of one projection; K and V interleaved page by page."""
    case = make((300, 1, 64), (300, 1, 64), 8, 2, 128, 16)
    wide = poison(torch.empty(365, 14, 128, dtype=FP8)).cuda()
    for at, x in ((1, case.q), (9, case.k), (11, case.v)):
        wide[:, at : at + x.shape[1]] = x.cuda()
    starts = case.batch.q_starts.cuda()
    got = prefill_attention(wide[:, 1:9], wide[:, 9:11], wide[:, 11:13], starts, kv_starts=starts, scale=128**-0.5)
    compare(got, case)
    both = torch.stack([case.k_pages, case.v_pages], 1).cuda()
    at = case.batch.to("cuda")
    where = {"page_table": at.page_table, "kv_lens": at.kv_lens}
    compare(prefill_attention(wide[:, 1:9], both[:, 0], both[:, 1], starts, scale=128**-0.5, **where), case)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_graph_replay_with_changed_lengths(paged: bool) -> None:
    case = make((300, 200, 1), (900, 700, 64), 4, 2, 128)
    (k, v), where = case.keys(paged)
    static = {name: x.cuda() for name, x in where.items()}
    q, k, v = (x.view(torch.uint8).masked_fill(x.float().isnan(), 0).view(FP8).cuda() for x in (case.q, k, v))
    starts = case.batch.q_starts.cuda()
    prefill_attention(q, k, v, starts, scale=0.1, **static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = prefill_attention(q, k, v, starts, scale=0.1, **static)
    for rows, keys in (
        ((300, 200, 1), (900, 700, 64)),
        ((1, 0, 400), (900, 0, 700)),
        ((0, 0, 0), (1, 1, 1)),
        ((10, 301, 129), (77, 640, 129)),
    ):
        starts.copy_(torch.tensor([0, *rows]).cumsum(0).int())
        if paged:
            static["kv_lens"].copy_(torch.tensor(keys, dtype=torch.int32).minimum(case.batch.kv_lens))
        else:
            static["kv_starts"].copy_(torch.tensor([0, *keys]).cumsum(0).int())
        for x in got:
            poison(x)
        graph.replay()
        for g, w in zip(got, prefill_attention(q, k, v, starts, scale=0.1, **static), strict=True):
            assert_same(g, w, f"rows {rows}")
            assert not g.isnan().any()


@pytest.mark.gpu
def test_offsets_beyond_2_to_the_31() -> None:
    case = make((140,), (12 * 64 - 3,), 16, 8, 128)
    pages = (1 << 31) // (64 * 8 * 128) + 40
    pools = [torch.empty(pages, 64, 8, 128, dtype=FP8, device="cuda") for _ in range(2)]
    own = case.batch.page_table[0, :12].long()
    for pool, small in zip(pools, (case.k_pages, case.v_pages), strict=True):
        pool[pages - 12 :] = small[own].cuda()
    table = torch.arange(pages - 12, pages, dtype=torch.int32, device="cuda").view(1, 12)
    at = case.batch.to("cuda")
    compare(prefill_attention(case.q.cuda(), *pools, at.q_starts, page_table=table, kv_lens=at.kv_lens, scale=128**-0.5), case)


@pytest.mark.gpu
def test_empty() -> None:
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    q, k = torch.empty(0, 4, 128, dtype=FP8, device="cuda"), torch.empty(0, 2, 128, dtype=FP8, device="cuda")
    out, lse = prefill_attention(q, k, k, none, kv_starts=none, scale=1.0)
    assert out.shape == (0, 4, 128) and out.dtype == BF16 and lse.shape == (0, 4)
