// Dense GEMM of e4m3 with a scale per 1x128 block of x and 128x128 block of w: sums in fp32 of the products of each 128 columns of K,
// times the scales of their blocks. (Scales per row and column are the epilogue's, and the sums those of dense_sums.cuh.)
#pragma once
#include "gemm/dense_sums.cuh"

namespace pyllm::dense {

// The scales of the next block are on their way while this one is multiplied.
template <class C>
struct BlockScales {
  const float* x[C::kBlocksM][2];
  const float* w;
  float next_x[C::kBlocksM][2], next_w;
  int k, last;

  __device__ __forceinline__ BlockScales(const Shape& shape, const Blocks& blocks, int m, int n, const Walk<C>& walk)
      : w(blocks.w + min(n, shape.n - 1) / 128 * blocks.w_stride), k(walk.k_begin), last(walk.k_end - 1) {
    const int row = m + 16 * static_cast<int>(threadIdx.x / 32 % 4) + static_cast<int>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) x[i][h] = blocks.x + min(row + 64 * i + 8 * h, shape.m - 1) * blocks.x_stride;
    }
    load();
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) next_x[i][h] = x[i][h][k];
    }
    next_w = w[k];
  }
  __device__ __forceinline__ void next(float (&scale)[C::kBlocksM][2]) {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[i][h] = next_x[i][h] * next_w;
    }
    k = min(k + 1, last);
    load();
  }
};

// Starts the products of one stage, or of two with their instructions in turn: those of one sum wait for each other, those of two do not.
template <class C, int Count>
__device__ __forceinline__ void start_blocks(float (&part)[Count][C::R], const Shared<C>& smem, int share, const int (&stage)[Count],
                                             int row) {
  uint64_t a[Count], b[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    a[i] = smem_descriptor<SmemLayout::kSwizzle128>(smem.a(stage[i]) + (share * C::kBlocksM + row) * 64 * kStageBytes, 8 * kStageBytes);
    b[i] = smem_descriptor<SmemLayout::kSwizzle128>(smem.b(stage[i]), 8 * kStageBytes);
    wgmma_pin(part[i]);
  }
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kStageBytes / 32; ++s) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      Wgmma<C::BN>::template ss<typename C::T>(part[i], descriptor_step(a[i], 32 * s), descriptor_step(b[i], 32 * s), s > 0);
    }
  }
  wgmma_commit();
}

template <int R>
__device__ __forceinline__ void promote(float (&d)[R], float (&part)[R], const float (&scale)[2]) {
  wgmma_pin(part);
#pragma unroll
  for (int j = 0; j < R; ++j) d[j] = fmaf(part[j], scale[j / 2 % 2], d[j]);
}

// Two warpgroups of 64 rows: each takes the tensor cores for two stages and scales them while the other has them. (Without the turns both
// multiply at once and then both scale at once.) Named barriers 6 and 7 pass the turn on; warpgroup 1 gives the first away.
template <class C>
__device__ __forceinline__ void sum_block_pairs(float (&d)[C::R], BlockScales<C>& scales, const Shared<C>& smem, const Walk<C>& walk,
                                                int share, Ring<C>& ring) {
  float part[2][C::R], scale[2][1][2];
  int k = walk.k_begin;
  for (; k + 1 < walk.k_end; k += 2) {
    int stage[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      stage[i] = ring.stage;
      barrier_wait(smem.full(ring.stage), ring.phase);
      ring.next();
      scales.next(scale[i]);
    }
    named_sync(6 + share, 256);
    start_blocks<C, 2>(part, smem, share, stage, 0);
    named_arrive(7 - share, 256);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      release(smem.empty(stage[i]));
      promote(d, part[i], scale[i][0]);
    }
  }
  if (k < walk.k_end) {
    auto& last = reinterpret_cast<float (&)[1][C::R]>(part[0]);
    const int stage[1] = {ring.stage};
    barrier_wait(smem.full(ring.stage), ring.phase);
    ring.next();
    scales.next(scale[0]);
    start_blocks<C, 1>(last, smem, share, stage, 0);
    wgmma_wait<0>();
    release(smem.empty(stage[0]));
    promote(d, last[0], scale[0][0]);
  }
}

template <class C>
__device__ __forceinline__ void sum_blocks(float (&d)[C::kBlocksM][C::R], BlockScales<C>&& scales, const Shared<C>& smem,
                                           const Walk<C>& walk, int share, Ring<C>& ring) {
  static_assert(C::BK == 128 && 128 % C::BN == 0 && C::kWay != Way::kTurns, "a stage is one block, a tile has one scale of w");
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < C::R; ++j) d[i][j] = 0.f;
  }
  if constexpr (C::kBlocksM == 1) {
    sum_block_pairs<C>(d[0], scales, smem, walk, share, ring);
  } else {
    float scale[C::kBlocksM][2];
    for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
      scales.next(scale);
      barrier_wait(smem.full(ring.stage), ring.phase);
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
        float part[1][C::R];
        const int stage[1] = {ring.stage};
        start_blocks<C, 1>(part, smem, share, stage, i);
        wgmma_wait<0>();
        if (i == C::kBlocksM - 1) release(smem.empty(ring.stage));
        promote(d[i], part[0], scale[i]);
      }
    }
  }
}

}  // namespace pyllm::dense
