// Dense GEMM of up to 64 rows of x (sm_90a): what counts is the stream of w, and that it does not stop between kernels.
//
// One warpgroup multiplies a tile of 64 x BN. w and x have rings of their own: that of w is filled before the wait for the kernels ahead,
// which do not write weights. x comes out of the L2, but a ring of three stages for it (48 KB) made the kernel 5 to 25 % slower than one
// as deep as that of w. A stage is 256 bytes of K of each row, two boxes asked for at once: memory reads 128 bytes of a row at a time at
// 77 % of the speed. Of x only the rows that exist are asked for, by eight; the others hold what was there, and TMA does not store them.
// Scales, bias, join and stores are those of dense_linear.cuh.
#pragma once
#include "gemm/dense_linear.cuh"

namespace pyllm::dense {

// Parts of columns that are no multiple of 16, which fill the GPU where others do not, go to memory without TMA.
template <int BN, int Split>
constexpr bool kFewDirect = BN / Split % 16 != 0;

template <class T_, class Out_, int BN_, int Split_>
struct FewTile : Tile<T_, Out_, Way::kTogether, 64, kFewDirect<BN_, Split_> ? 64 * Split_ : BN_, Split_> {
  using Base = Tile<T_, Out_, Way::kTogether, 64, kFewDirect<BN_, Split_> ? 64 * Split_ : BN_, Split_>;
  static constexpr bool kDirect = kFewDirect<BN_, Split_>;
  static constexpr int BN = BN_, R = BN / 2, kBytesB = BN * kStageBytes, kBytesColumns = BN * 8;
  static constexpr int kBytesJoin = (Split_ - 1) * 64 * (BN / Split_) * 4;
  static constexpr int kChunkBytes = kDirect ? 0 : Base::kChunkBytes;
  static constexpr int kBoxes = 2, BK = kBoxes * Base::BK;
  static constexpr int kBytesX = kBoxes * Base::kBytesA, kBytesW = kBoxes * kBytesB;  // of a stage
  static constexpr int kTail = Base::kChunkBuffers * kChunkBytes + kBytesColumns + kBytesJoin + 2 * kBarrierBytes;
  static constexpr int kRoom = kSmemPerSm - 1024 - kTail;
  static constexpr int kXStages = kRoom / (kBytesX + kBytesW), kWStages = (kRoom - kXStages * kBytesX) / kBytesW;
  static constexpr int kStages = kXStages + kWStages;  // those of w first
  static constexpr int kRing = kXStages * kBytesX + kWStages * kBytesW;
  static constexpr int kSmem = kRing + kTail;
  static_assert(kXStages >= 2 && BN / Split_ % 8 == 0 && 8 * (2 * kStages + 3) <= 2 * kBarrierBytes);
};

// A place in one of the two rings.
template <int Stages>
struct FewRing {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class C>
__device__ __forceinline__ uint32_t few_x(const Shared<C>& smem, int stage) {
  return smem.base + stage * C::kBytesX;
}
template <class C>
__device__ __forceinline__ uint32_t few_w(const Shared<C>& smem, int stage) {
  return smem.base + C::kXStages * C::kBytesX + stage * C::kBytesW;
}

template <class C>
__device__ __forceinline__ void produce_few_w(const Maps& maps, const Shape& shape, const Shared<C>& smem, const Walk<C>& walk) {
  FewRing<C::kWStages> ring;
  for (int tile = walk.first(); tile < walk.count(); tile += walk.step) {
    int m, n;
    walk.origin(tile, shape.raster, m, n);
    for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
      const uint32_t full = smem.full(ring.stage);
      barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
      barrier_arrive_expect(full, C::kBytesW);
#pragma unroll
      for (int b = 0; b < C::kBoxes; ++b) {
        tma_load(few_w(smem, ring.stage) + b * C::kBytesB, &maps.w, full, k * C::BK + b * C::Base::BK, n);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void produce_few_x(const Maps& maps, const Shape& shape, const Shared<C>& smem, const Walk<C>& walk) {
  const int bytes = C::kBoxes * kStageBytes * min(64, (shape.m + 7) / 8 * 8);
  FewRing<C::kXStages> ring;
  for (int tile = walk.first(); tile < walk.count(); tile += walk.step) {
    for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
      const uint32_t full = smem.full(C::kWStages + ring.stage);
      barrier_wait(smem.empty(C::kWStages + ring.stage), ring.phase ^ 1);
      barrier_arrive_expect(full, bytes);
#pragma unroll
      for (int b = 0; b < C::kBoxes; ++b) {
        tma_load(few_x(smem, ring.stage) + b * C::kBytesA, &maps.x, full, k * C::BK + b * C::Base::BK, 0);
      }
    }
  }
}

template <class C>
struct FewRings {
  FewRing<C::kWStages> w;
  FewRing<C::kXStages> x;
};

template <class C>
__device__ __forceinline__ void sum_few(float (&d)[1][C::R], const Shared<C>& smem, const Walk<C>& walk, FewRings<C>& rings) {
  uint32_t previous_w = 0, previous_x = 0;
  for (int k = walk.k_begin; k < walk.k_end; ++k) {
    barrier_wait(smem.full(rings.w.stage), rings.w.phase);
    barrier_wait(smem.full(C::kWStages + rings.x.stage), rings.x.phase);
    const uint64_t a = smem_descriptor<SmemLayout::kSwizzle128>(few_x(smem, rings.x.stage), 8 * kStageBytes);
    const uint64_t b = smem_descriptor<SmemLayout::kSwizzle128>(few_w(smem, rings.w.stage), 8 * kStageBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::kBoxes * kStageBytes / 32; ++i) {
      const int box = i * 32 / kStageBytes, inside = i * 32 % kStageBytes;
      Wgmma<C::BN>::template ss<typename C::T>(d[0], descriptor_step(a, box * C::kBytesA + inside),
                                               descriptor_step(b, box * C::kBytesB + inside), k > walk.k_begin || i > 0);
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (k > walk.k_begin) {
      gemm::release(previous_w);
      gemm::release(previous_x);
    }
    previous_w = smem.empty(rings.w.stage);
    previous_x = smem.empty(C::kWStages + rings.x.stage);
    rings.w.next();
    rings.x.next();
  }
  wgmma_wait<0>();
  wgmma_pin(d[0]);
  gemm::release(previous_w);
  gemm::release(previous_x);
}

// The columns of this CTA, two at a time.
template <class C>
__device__ __forceinline__ void store_few(const float (&d)[C::R], const float (&row_scale)[2], typename C::Out* out, const Shape& shape,
                                          const Shared<C>& smem, int n, int own) {
  const int lane = threadIdx.x % 32, row = 16 * (threadIdx.x / 32 % 4) + lane / 4;
#pragma unroll
  for (int u = 0; u < C::BN / C::kSplit / 8; ++u) {
    const int column = n + own + 8 * u;
    float v[2][2];
    scale_unit<C>(v, d, u, row_scale, smem.columns(0) + 8 * own);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= shape.m || column >= shape.n) continue;
      typename C::Out* to = out + static_cast<int64_t>(row + 8 * h) * shape.n + column + 2 * (lane % 4);
      *reinterpret_cast<uint32_t*>(to) = gemm::pack<typename C::Out>(v[h][0], v[h][1]);
    }
  }
}

template <class C>
__device__ __forceinline__ void consume_few(const Maps& maps, const Shape& shape, const gemm::EpilogueParams& e, const Shared<C>& smem,
                                            const Walk<C>& walk, typename C::Out* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  FewRings<C> rings;
  uint32_t columns_phase = 0;
  int buffer = 0;
  for (int tile = walk.first(); tile < walk.count(); tile += walk.step, columns_phase ^= 1) {
    int m, n;
    walk.origin(tile, shape.raster, m, n);
    float d[1][C::R];
    sum_few<C>(d, smem, walk, rings);
    if constexpr (C::kSplit > 1) join_split<C>(d, smem, walk);
    float row_scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * warp + 8 * h + lane / 4;
      row_scale[h] = e.row_scale != nullptr && row < shape.m ? __ldcg(e.row_scale + static_cast<int64_t>(row) * e.row_scale_step) : 1.f;
    }
    barrier_wait(smem.columns_full(0), columns_phase);
    const int own = C::kSplit > 1 ? walk.split * (C::BN / C::kSplit) : 0;
    if constexpr (C::kDirect) {
      store_few<C>(d[0], row_scale, out, shape, smem, n, own);
    } else {
#pragma unroll
      for (int c = 0; c < C::BN / C::kChunk / C::kSplit; ++c) {
        const int column = own + c * C::kChunk;
        store_chunk<C>(&d[0][c * C::kChunk / 2], row_scale, maps, shape, e, smem, 0, 0, buffer, Place{0, n + column, column});
      }
    }
    if constexpr (C::kSplit > 1) break;  // one tile each; in a loop the compiler would let each product wait for the last
    if constexpr (C::kDirect) __syncwarp();
    if (lane == 0) barrier_arrive(smem.columns_empty(0));
  }
  if (threadIdx.x % 128 == 0) store_wait<0>();
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) few_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Shape shape,
                                                             const __grid_constant__ gemm::EpilogueParams epilogue, typename C::Out* out) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> smem{smem_address(memory)};
  const Walk<C> walk(shape);
  const int warp = threadIdx.x / 32;
  if (warp == 0 && elect_one()) {
    prefetch_map(&maps.w);
    prefetch_map(&maps.x);
    prefetch_map(&maps.y);
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(smem.full(s), 1);
      barrier_init(smem.empty(s), 4);
    }
    barrier_init(smem.columns_full(0), 32);
    barrier_init(smem.columns_empty(0), 4);
    if constexpr (C::kSplit > 1) {
      barrier_init(smem.landed(), 1);
      barrier_arrive_expect(smem.landed(), C::kBytesJoin);
    }
    barrier_init_fence();
  }
  if constexpr (C::kSplit > 1) {
    __syncwarp();
    cluster_arrive();  // join_split waits
  }
  __syncthreads();
  if (warp < 4) {
    if (warp == 0) {
      if (elect_one()) produce_few_w<C>(maps, shape, smem, walk);
      __syncwarp();
    } else if (warp == 1) {
      pdl_wait();
      produce_columns<C>(shape, epilogue, smem, walk);
    } else if (warp == 2) {
      pdl_wait();
      if (elect_one()) produce_few_x<C>(maps, shape, smem, walk);
      __syncwarp();
    }
    pdl_trigger();
    if constexpr (C::kSplit > 1) {
      __syncwarp();
      cluster_wait();
    }
  } else {
    pdl_wait();
    consume_few<C>(maps, shape, epilogue, smem, walk, out);
  }
}

}  // namespace pyllm::dense
