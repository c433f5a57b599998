"""A grouped product in Triton: out[pair] = x[pair / DIVIDE] w[e]^T [* weights[pair]], blocks of BM pairs of one expert."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    x, w, out, weights, pairs, experts, taken, N, K, count,
    DIVIDE: tl.constexpr, WEIGHTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    at, blocks_n, used = tl.program_id(0), tl.cdiv(N, BN), tl.load(taken)
    blocks_m = tl.cdiv(used, BM)
    if at >= blocks_m * blocks_n:
        return
    first = at // (GROUP * blocks_n) * GROUP
    size = min(blocks_m - first, GROUP)
    m, n = first + at % (GROUP * blocks_n) % size, at % (GROUP * blocks_n) // size
    pair = tl.load(pairs + m * BM + tl.arange(0, BM)).to(tl.int64)
    there = pair < count
    columns, k = n * BN + tl.arange(0, BN).to(tl.int64), tl.arange(0, BK)
    expert = tl.load(experts + m).to(tl.int64)
    a = x + pair[:, None] // DIVIDE * K + k[None, :]
    b = w + expert * N * K + (columns % N)[None, :] * K + k[:, None]
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        sums = tl.dot(tl.load(a, mask=there[:, None], other=0.0), tl.load(b), sums)
        a += BK
        b += BK
    if WEIGHTED:
        sums *= tl.load(weights + pair, mask=there, other=0.0)[:, None]
    to = out + pair[:, None] * N + columns[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=there[:, None] & (columns < N)[None, :])
