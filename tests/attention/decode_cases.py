"""Batches for the tests of decode_attention, its call, and a reference in fp64. Unused slots, pages and table tails are poison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyllm import ops
from tests.support.compare import EPS, assert_close
from tests.support.generate import RaggedBatch, filled_pools, gather, normal, ragged_batch

BF16, FP16, FP8, S8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
LENGTHS = (1, 0, 63, 64, 65, 127, 129, 500, 1000, 16, 17)
S8_STEP = 1 / 40  # value of one in an int8 cache of normal numbers
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 100},
    "window-1": {"window": 1},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 70, "softcap": 2.0, "sinks": True},
}


def make(
    q_lens: list[int],
    kv_lens: list[int],
    H: int,
    K: int,
    D: int,
    P: int,
    dtype: torch.dtype = BF16,
    cache: torch.dtype | None = None,
    spare: int = 0,
) -> tuple[RaggedBatch, Tensor, Tensor, Tensor]:
    """spare: rows of q that belong to no sequence. int8 pools have no NaN: what is unused is the largest number."""
    batch = ragged_batch([min(n, L) for n, L in zip(q_lens, kv_lens, strict=True)], kv_lens, page_size=P)
    k, v = filled_pools(batch, K, D, torch.float32 if cache == S8 else cache or dtype)
    if cache == S8:
        k, v = ((x / S8_STEP).round().nan_to_num(127).clamp(-127, 127).to(S8) for x in (k, v))
    return batch, normal(batch.T + spare, H, D, dtype=dtype), k, v


def scales_of(cache: torch.dtype, K: int) -> dict[str, Tensor]:
    """One per head for keys, one for all values."""
    if cache not in (FP8, S8):
        return {}
    unit = S8_STEP if cache == S8 else 1.0
    return {"k_scale": torch.linspace(0.5, 1.25, K) * unit, "v_scale": torch.tensor([3.0 * unit])}


def call(batch: RaggedBatch, q: Tensor, k: Tensor, v: Tensor, device: str = "cuda", **options: Any) -> tuple[Tensor, Tensor]:
    options = {"scale": q.shape[2] ** -0.5, "max_q": max(1, *batch.q_lens())} | options
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    at = batch.to(device)
    return ops.decode_attention(q.to(device), k.to(device), v.to(device), at.page_table, at.q_starts, at.kv_lens, **moved)


def oracle(
    batch: RaggedBatch, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o, sum of p |v|, and LSE in fp64, of the values as they are stored."""
    T, H, D = q.shape
    K = k.shape[2]
    out, size = torch.zeros(2, T, H, D, dtype=torch.float64)
    lse = torch.full((T, H), float("-inf"), dtype=torch.float64)
    starts = batch.q_starts.tolist()
    for b, L in enumerate(batch.kv_lens.tolist()):
        rows, n = slice(starts[b], starts[b + 1]), starts[b + 1] - starts[b]
        if n and not L and sinks is not None:
            lse[rows] = sinks.double()
        if not n or not L:
            continue
        keys, values = (gather(x, batch, b).double() * (1.0 if s is None else s.double()[:, None]) for x, s in ((k, k_scale), (v, v_scale)))
        s = torch.einsum("nkgd,lkd->nkgl", q[rows].double().unflatten(1, (K, -1)), keys) * scale
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        at, key = torch.arange(L - n, L)[:, None], torch.arange(L)[None]
        seen = (key <= at) & (key > at - (window or L))
        if mask is not None:
            seen &= (key < L - n) | (mask[rows].long()[:, None] >> (key - L + n).clamp_min(0) & 1 == 1)
        s = s.masked_fill(~seen[:, None, None], float("-inf"))
        if sinks is not None:
            s = torch.cat([s, sinks.double().view(1, K, -1, 1).expand(n, -1, -1, -1)], -1)
        one = torch.logsumexp(s, -1)
        p = torch.exp(s - torch.where(one.isinf(), 0.0, one)[..., None])[..., :L]
        out[rows], size[rows] = (torch.einsum("nkgl,lkd->nkgd", p, x).reshape(n, H, D) for x in (values, values.abs()))
        lse[rows] = one.reshape(n, H)
    return out, size, lse


def compare(
    got: tuple[Tensor, Tensor], batch: RaggedBatch, q: Tensor, k: Tensor, v: Tensor, rows: slice = slice(None), **options: Any
) -> None:
    """Against fp64 on the stored values, per element. Rounding the weights (u of the mma's dtype) errs by at most u sum p |v|, the
    result by u |o|; fp32 scores err by about (D + keys) 2^-24 times |s| <= 16 in the exponent, that is in p relatively."""
    for name in ("max_q", "invariant"):
        options.pop(name, None)
    want, size, lse = oracle(batch, q, k, v, **({"scale": q.shape[2] ** -0.5} | options))
    inside = 16 * (q.shape[2] + int(batch.kv_lens.max())) * EPS[torch.float32]
    weights = EPS[FP16 if k.element_size() == 1 else q.dtype]
    atol = size * (weights + inside) + want.abs() * EPS[q.dtype] + 1e-6
    assert_close(got[0][rows], want[rows], atol=atol[rows], what="out")
    assert_close(got[1][rows], lse[rows], atol=inside, what="lse")


def sinks_of(options: dict[str, Any], H: int) -> dict[str, Any]:
    return options | ({"sinks": normal(H)} if options.get("sinks") else {})


def tree_mask(q_lens: list[int], dtype: torch.dtype) -> Tensor:
    """A random tree of each sequence's new tokens: a row sees itself and its ancestors, parents come before children."""
    words: list[int] = []
    for n in q_lens:
        first = len(words)
        for j in range(n):
            parent = int(torch.randint(-1, j, ())) if j else -1
            words.append(1 << j | (words[first + parent] if parent >= 0 else 0))
    bits = 32 if dtype == torch.int32 else 64
    return torch.tensor([w - (1 << bits) if w >> (bits - 1) else w for w in words], dtype=dtype)
