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

// The products of one stage and 64 rows, block i of this warpgroup's.
template <class C>
__device__ __forceinline__ void multiply_block(float (&part)[C::R], const Shared<C>& smem, int share, int stage, int i) {
  const uint64_t a =
      smem_descriptor<SmemLayout::kSwizzle128>(smem.a(stage) + (share * C::kBlocksM + i) * 64 * kStageBytes, 8 * kStageBytes);
  const uint64_t b = smem_descriptor<SmemLayout::kSwizzle128>(smem.b(stage), 8 * kStageBytes);
  wgmma_pin(part);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kStageBytes / 32; ++s) {
    Wgmma<C::BN>::template ss<typename C::T>(part, descriptor_step(a, 32 * s), descriptor_step(b, 32 * s), s > 0);
  }
  wgmma_commit();
}

// While one warpgroup scales, the other keeps the tensor cores busy.
template <class C>
__device__ __forceinline__ void sum_blocks(float (&d)[C::kBlocksM][C::R], BlockScales<C>&& scales, const Shared<C>& smem,
                                           const Walk<C>& walk, int share, Ring<C>& ring) {
  static_assert(C::BK == 128 && 128 % C::BN == 0 && C::kWay == Way::kTogether, "a stage is one block, a tile has one scale of w");
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < C::R; ++j) d[i][j] = 0.f;
  }
  float scale[C::kBlocksM][2];
  for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
    scales.next(scale);
    barrier_wait(smem.full(ring.stage), ring.phase);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      float part[C::R];
      multiply_block<C>(part, smem, share, ring.stage, i);
      wgmma_wait<0>();
      wgmma_pin(part);
      if (i == C::kBlocksM - 1) gemm::release(smem.empty(ring.stage));
#pragma unroll
      for (int j = 0; j < C::R; ++j) d[i][j] = fmaf(part[j], scale[i][j / 2 % 2], d[i][j]);
    }
  }
}

}  // namespace pyllm::dense
