// Dense GEMM of e4m3 with a scale per 1x128 block of x and 128x128 block of w: sums in fp32 of the products of each 128 columns of K,
// times the scales of their blocks. (Scales per row and column are the epilogue's, and the sums those of dense_sums.cuh.)
#pragma once
#include "gemm/dense_sums.cuh"

namespace pyllm::dense {

// The scales of two rows, of x times of w: of four stages, while the next four are on their way. Every lane loads all that it uses: lanes
// that hold a part each and trade (shuffles, shared memory) took 6 % longer, for what they trade waits behind the products in flight. Loads
// that the next stage waits for took 19 %: a stage is shorter than the L2's latency.
template <class C>
struct BlockScales {
  static constexpr int kSpan = 4;
  const float* x[2];
  const float* w;
  float now[kSpan][2], ahead[2][kSpan], ahead_w[kSpan];
  int next, last;
  bool wide;

  __device__ __forceinline__ BlockScales(const Shape& shape, const Blocks& blocks, int m, int n, const Walk<C>& walk)
      : w(blocks.w + min(n, shape.n - 1) / 128 * blocks.w_stride), next(walk.k_begin), last(walk.k_end - 1) {
    const int row = m + 16 * static_cast<int>(threadIdx.x / 32 % 4) + static_cast<int>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) x[h] = blocks.x + min(row + 8 * h, shape.m - 1) * blocks.x_stride;
    // Nothing to add, but not the same for all lanes to the compiler, who would move what is loaded from there to uniform registers, and
    // wait for it at once.
    w += static_cast<int>(threadIdx.x % 32) * (shape.raster >> 30);
    const int64_t ragged = reinterpret_cast<int64_t>(blocks.x) / 4 | reinterpret_cast<int64_t>(blocks.w) / 4 | blocks.x_stride |
                           blocks.w_stride | walk.k_begin | walk.k_end;
    wide = ragged % kSpan == 0;
    load();
  }
  __device__ __forceinline__ void load() {
    if (wide) {
#pragma unroll
      for (int h = 0; h < 2; ++h) load_wide(ahead[h], x[h] + min(next, last + 1 - kSpan));
      load_wide(ahead_w, w + min(next, last + 1 - kSpan));
    } else {
#pragma unroll
      for (int c = 0; c < kSpan; ++c) {
        const int k = min(next + c, last);
#pragma unroll
        for (int h = 0; h < 2; ++h) asm volatile("ld.global.f32 %0, [%1];" : "=f"(ahead[h][c]) : "l"(x[h] + k) : "memory");
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(ahead_w[c]) : "l"(w + k) : "memory");
      }
    }
    next += kSpan;
  }
  static __device__ __forceinline__ void load_wide(float (&v)[kSpan], const float* from) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(from) : "memory");
  }
  // To the next four stages.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int c = 0; c < kSpan; ++c) now[c][h] = ahead[h][c] * ahead_w[c];
    }
    load();
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

// Two buffers in turn: while the products of a stage are scaled and added, those of the next one are on the tensor cores. (Each count of
// stages left has an end of its own. From one end for all the compiler joins the loop with it, takes a buffer in flight for one that is
// read, and waits after each product.)
template <class C>
struct BlockSums {
  static_assert(C::BK == 128 && 128 % C::BN == 0 && C::kBlocksM == 1 && C::kWay == Way::kTogether,
                "a stage and a tile have one scale of w");
  float even[C::R], odd[C::R];
};

// The first stage of a tile: its products run while the sums of the tile before are stored.
template <class C>
__device__ __forceinline__ void start_blocks(BlockSums<C>& sums, const Shared<C>& smem, int share, const Ring<C>& ring) {
  barrier_wait(smem.full(ring.stage), ring.phase);
  multiply_block<C>(sums.even, smem, share, ring.stage);
}

template <class C>
__device__ __forceinline__ void sum_blocks(float (&d)[C::kBlocksM][C::R], BlockSums<C>& sums, BlockScales<C>& scales, const Shared<C>& smem,
                                           const Walk<C>& walk, int share, Ring<C>& ring) {
#pragma unroll
  for (int j = 0; j < C::R; ++j) d[0][j] = 0.f;
  float (&even)[C::R] = sums.even;
  float (&odd)[C::R] = sums.odd;
  const auto step = [&](float (&part)[C::R], float (&other)[C::R], int i) {
    const int stage = ring.stage;
    ring.next();
    barrier_wait(smem.full(ring.stage), ring.phase);
    multiply_block<C>(other, smem, share, ring.stage);
    wgmma_wait<1>();
    gemm::release(smem.empty(stage));
    add_block<C>(d[0], part, scales.now[i]);
  };
  const auto end = [&](float (&part)[C::R], int i) {
    wgmma_wait<0>();
    gemm::release(smem.empty(ring.stage));
    add_block<C>(d[0], part, scales.now[i]);
  };
  int left = walk.k_end - walk.k_begin;
  for (; left > BlockScales<C>::kSpan; left -= BlockScales<C>::kSpan) {
    scales.turn();
    step(even, odd, 0);
    step(odd, even, 1);
    step(even, odd, 2);
    step(odd, even, 3);
  }
  scales.turn();
  if (left == 1) {
    end(even, 0);
  } else {
    step(even, odd, 0);
    if (left == 2) {
      end(odd, 1);
    } else {
      step(odd, even, 1);
      if (left == 3) {
        end(even, 2);
      } else {
        step(even, odd, 2);
        end(odd, 3);
      }
    }
  }
  ring.next();
}

}  // namespace pyllm::dense
