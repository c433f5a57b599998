// Dense GEMM of e4m3 with a scale per 1x128 block of x and 128x128 block of w: sums in fp32 of the products of each 128 columns of K,
// times the scales of their blocks. (Scales per row and column are the epilogue's, and the sums those of dense_sums.cuh.)
#pragma once
#include "gemm/dense_sums.cuh"

namespace pyllm::dense {

// The scales of a warpgroup's rows, of x times of w. Four neighbouring lanes share two rows: each of them holds two of the next eight
// stages' scales of a row, and the eight after those are on their way. Loads that the next stage waits for took 19 % of the time: a stage
// is shorter than the L2's latency.
template <class C>
struct BlockScales {
  static constexpr int kSpan = 8;
  const float* x[2];
  const float* w;
  float now[2][2], ahead[2][2], ahead_w[2];
  int next, last;

  __device__ __forceinline__ BlockScales(const Shape& shape, const Blocks& blocks, int m, int n, const Walk<C>& walk)
      : w(blocks.w + min(n, shape.n - 1) / 128 * blocks.w_stride), next(walk.k_begin), last(walk.k_end - 1) {
    const int row = m + 16 * static_cast<int>(threadIdx.x / 32 % 4) + static_cast<int>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) x[h] = blocks.x + min(row + 8 * h, shape.m - 1) * blocks.x_stride;
    load();
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int k = min(next + kSpan / 2 * c + static_cast<int>(threadIdx.x % 4), last);
#pragma unroll
      for (int h = 0; h < 2; ++h) asm volatile("ld.global.f32 %0, [%1];" : "=f"(ahead[h][c]) : "l"(x[h] + k) : "memory");
      asm volatile("ld.global.f32 %0, [%1];" : "=f"(ahead_w[c]) : "l"(w + k) : "memory");
    }
    next += kSpan;
  }
  // To the next eight stages.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int c = 0; c < 2; ++c) now[h][c] = ahead[h][c] * ahead_w[c];
    }
    load();
  }
  // Of one of them, counted from the first stage of all.
  __device__ __forceinline__ void get(float (&scale)[2], int stage) const {
    const int from = static_cast<int>(threadIdx.x % 32 & ~3) | (stage & 3);
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = __shfl_sync(0xffffffff, stage & 4 ? now[h][1] : now[h][0], from);
  }
};

// The products of one stage.
template <class C>
__device__ __forceinline__ void multiply_block(float (&part)[C::R], const Shared<C>& smem, int share, int stage) {
  const uint64_t a = smem_descriptor<SmemLayout::kSwizzle128>(smem.a(stage) + share * 64 * kStageBytes, 8 * kStageBytes);
  const uint64_t b = smem_descriptor<SmemLayout::kSwizzle128>(smem.b(stage), 8 * kStageBytes);
  wgmma_pin(part);
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kStageBytes / 32; ++s) {
    Wgmma<C::BN>::template ss<typename C::T>(part, descriptor_step(a, 32 * s), descriptor_step(b, 32 * s), s > 0);
  }
  wgmma_commit();
}

template <class C>
__device__ __forceinline__ void add_block(float (&d)[C::R], float (&part)[C::R], const float (&scale)[2]) {
  wgmma_pin(part);
#pragma unroll
  for (int j = 0; j < C::R; ++j) d[j] = fmaf(part[j], scale[j / 2 % 2], d[j]);
}

// Two buffers in turn: while the products of a stage are scaled and added, those of the next one are on the tensor cores. (The two ends
// below look alike but for the buffer. With an end that is the same on every path the compiler joins it with the loop, takes a buffer in
// flight for one that is read, and waits after each product.)
template <class C>
__device__ __forceinline__ void sum_blocks(float (&d)[C::kBlocksM][C::R], BlockScales<C>&& scales, const Shared<C>& smem,
                                           const Walk<C>& walk, int share, Ring<C>& ring) {
  static_assert(C::BK == 128 && 128 % C::BN == 0 && C::kBlocksM == 1 && C::kWay == Way::kTogether,
                "a stage and a tile have one scale of w");
#pragma unroll
  for (int j = 0; j < C::R; ++j) d[0][j] = 0.f;
  float even[C::R], odd[C::R], scale[2];
  barrier_wait(smem.full(ring.stage), ring.phase);
  multiply_block<C>(even, smem, share, ring.stage);
  const auto step = [&](float (&part)[C::R], float (&other)[C::R], int k) {
    const int stage = ring.stage;
    scales.get(scale, k);
    ring.next();
    barrier_wait(smem.full(ring.stage), ring.phase);
    multiply_block<C>(other, smem, share, ring.stage);
    wgmma_wait<1>();
    gemm::release(smem.empty(stage));
    add_block<C>(d[0], part, scale);
  };
  const auto end = [&](float (&part)[C::R], int k) {
    scales.get(scale, k);
    wgmma_wait<0>();
    gemm::release(smem.empty(ring.stage));
    add_block<C>(d[0], part, scale);
  };
  const int steps = walk.k_end - walk.k_begin;
  int k = 0;
  while (k + 2 < steps) {
    scales.turn();
    const int stop = min(k + BlockScales<C>::kSpan, steps - 2);
#pragma unroll 1
    do {
      step(even, odd, k);
      step(odd, even, k + 1);
      k += 2;
    } while (k < stop);
  }
  if (k % BlockScales<C>::kSpan == 0) scales.turn();
  if (k + 1 < steps) {
    step(even, odd, k);
    end(odd, k + 1);
  } else {
    end(even, k);
  }
  ring.next();
}

}  // namespace pyllm::dense
