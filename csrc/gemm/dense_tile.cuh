// Dense GEMM, the parts that every kernel shares: tile shapes, shared memory, the walk over tiles, the warps that feed.
// dense_linear.cuh says how they work together.
#pragma once
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/vec.cuh"
#include "common/wgmma.cuh"
#include "gemm/epilogue_params.h"

namespace pyllm::dense {

constexpr int kStageBytes = 128;  // of one row of a stage: the span of the 128-byte swizzle
constexpr int kSmemPerSM = 227 * 1024;
constexpr int kReservedPerCta = 1024;

// How the products are summed: kPlain leaves the whole sum over K in the tensor core's accumulators (for e4m3 they keep about 14 bits
// of the products' alignment), kBlock takes each 128 columns of K out and adds them in fp32, times the scales of their blocks.
enum class Sums { kPlain, kBlock };

// How the multiplying warpgroups of an SM work: two halves of one tile; two tiles in turns, one storing while the other multiplies; or a
// CTA has one and the SM two CTAs, which drift apart by themselves.
enum class Way { kTogether, kTurns, kAlone, kThree, kPair };

// What follows the scales and the bias: nothing, or (Full) an activation or gate, a soft cap, a residual.
struct Linear {
  static constexpr bool kFull = false, kGated = false;
  static constexpr int kAct = gemm::kNoActivation;
};
template <int Act, bool Gated>
struct Full {
  static constexpr bool kFull = true, kGated = Gated;
  static constexpr int kAct = Act;
};

template <class T_, class Out_, Way Way_, int BM_, int BN_, int ClusterM_, int ClusterN_, int Split_, class Finish_ = Linear,
          Sums Sums_ = Sums::kPlain>
struct Tile {
  using T = T_;
  using Out = Out_;
  using Finish = Finish_;
  using Sum = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;
  static constexpr int BM = BM_, BN = BN_, kClusterM = ClusterM_, kClusterN = ClusterN_, kSplit = Split_;
  static constexpr Sums kSums = Sums_;
  static constexpr Way kWay = Way_;
  static constexpr int BK = kStageBytes / sizeof(T);
  static constexpr int kConsumers = kWay == Way::kAlone ? 1 : kWay == Way::kThree ? 3 : 2;
  static constexpr int kSharers = kWay == Way::kTurns || kWay == Way::kAlone ? 1 : kConsumers;  // warpgroups of one tile
  static constexpr int kTiles = kConsumers / kSharers;                                          // at a time
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlocksM = BM / (64 * kSharers);  // of 64 rows, per warpgroup
  static constexpr int R = BN / 2;                       // sums per thread and 64 rows
  static constexpr int kCluster = kClusterM * kClusterN * kSplit;
  static constexpr int kChunk = BN / kSplit % 64 == 0 ? 64 : BN / kSplit % 32 == 0 ? 32 : 16;  // columns of sums of one TMA store
  static constexpr int kChunkOut = Finish::kGated ? kChunk / 2 : kChunk;
  static constexpr int kChunkBytes = 64 * kChunkOut * sizeof(Out);
  static constexpr int kCtasPerSM = kWay == Way::kAlone || kWay == Way::kPair ? 2 : 1;
  static constexpr int kChunkBuffers = kCtasPerSM == 2 && BM * BN >= 128 * 128 ? 1 : 2;
  static constexpr int kBytesA = BM * kStageBytes, kBytesB = BN * kStageBytes;
  static constexpr int kBytesC = kConsumers * kChunkBuffers * kChunkBytes;
  static constexpr int kBytesColumns = BN * 8;                          // of one tile
  static constexpr int kTail = kBytesC + kTiles * kBytesColumns + 256;  // 256: barriers
  static constexpr int kBudget = (kSmemPerSM + kReservedPerCta) / kCtasPerSM - kReservedPerCta;
  static constexpr int kFit = (kBudget - kTail) / (kBytesA + kBytesB);
  static constexpr int kStages = kFit > 8 ? 8 : kFit;
  static constexpr int kSmem = kStages * (kBytesA + kBytesB) + kTail;
  // Registers of the two roles where an even share of 65536 (168, or 128 with two CTAs) is too few for the sums.
  static constexpr bool kMoveRegisters = kCtasPerSM == 1 || kBlocksM * R + (kSums == Sums::kBlock ? R : 0) > 64;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 24, kConsumerRegisters = kConsumers == 1   ? 224
                                                                                            : kConsumers == 2 ? 232
                                                                                                              : 160;
  static_assert(kStages >= 3 && BM % (64 * kSharers) == 0 && BN % 16 == 0 && BN <= 256 && kCluster <= 8);
  static_assert((kSplit & (kSplit - 1)) == 0 && (BN / kSplit) % kChunk == 0, "each CTA of a split stores whole chunks");
  static_assert(!Finish::kGated || (kChunk == 64 && kClusterM == 1),
                "a gated tile takes groups of 8 rows of w from both halves in one load");
  static_assert((kSplit - 1) * BM * (BN / kSplit) * 4 <= kStages * (kBytesA + kBytesB), "the parts of a split fit into the stages");
};

struct Shape {
  int m, n, k;
  int raster;  // tiles along M of one group of the walk
};

// Scales of Sums::kBlock.
struct Blocks {
  const float *x, *w;
  int64_t x_stride, w_stride;
};

struct Maps {
  CUtensorMap x, w, y;
};

// What each role walks over: the tiles of this cluster, then its own place in them.
template <class C>
struct Walk {
  int tiles_m, tiles_n, clusters, cluster_m, cluster_n, split, k_begin, k_end;

  __device__ __forceinline__ explicit Walk(const Shape& s) {
    tiles_m = (s.m + C::BM * C::kClusterM - 1) / (C::BM * C::kClusterM);
    tiles_n = (s.n + C::BN * C::kClusterN - 1) / (C::BN * C::kClusterN);
    clusters = gridDim.x / C::kCluster;
    const int rank = C::kCluster > 1 ? static_cast<int>(cluster_rank()) : 0;
    cluster_m = rank % C::kClusterM;
    cluster_n = rank / C::kClusterM % C::kClusterN;
    split = rank / (C::kClusterM * C::kClusterN);
    const int steps = (s.k + C::BK - 1) / C::BK;
    k_begin = steps * split / C::kSplit;
    k_end = steps * (split + 1) / C::kSplit;
  }
  __device__ __forceinline__ int first() const { return blockIdx.x / C::kCluster; }
  __device__ __forceinline__ int count() const { return tiles_m * tiles_n; }
  // Rows and columns of a tile. Groups of `raster` tiles along M go over all of N before the next group.
  __device__ __forceinline__ void origin(int tile, int raster, int& m, int& n) const {
    const int group = tile / (raster * tiles_n), inside = tile - group * raster * tiles_n;
    const int rows = min(raster, tiles_m - group * raster);
    m = ((group * raster + inside % rows) * C::kClusterM + cluster_m) * C::BM;
    n = (inside / rows * C::kClusterN + cluster_n) * C::BN;
  }
};

template <class C>
struct Shared {
  uint32_t base;
  __device__ __forceinline__ uint32_t a(int stage) const { return base + stage * C::kBytesA; }
  __device__ __forceinline__ uint32_t b(int stage) const { return base + C::kStages * C::kBytesA + stage * C::kBytesB; }
  __device__ __forceinline__ uint32_t c(int consumer) const {
    return base + C::kStages * (C::kBytesA + C::kBytesB) + consumer * C::kChunkBuffers * C::kChunkBytes;
  }
  __device__ __forceinline__ uint32_t columns(int turn) const { return c(C::kConsumers) + turn * C::kBytesColumns; }
  __device__ __forceinline__ uint32_t full(int stage) const { return columns(C::kTiles) + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(C::kStages + stage); }
  __device__ __forceinline__ uint32_t columns_full(int turn) const { return full(2 * C::kStages + turn); }
  __device__ __forceinline__ uint32_t columns_empty(int turn) const { return full(2 * C::kStages + C::kTiles + turn); }
};

// A place in the ring of stages.
template <class C>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int steps) {
    const int to = stage + steps;
    phase ^= to / C::kStages & 1;
    stage = to % C::kStages;
  }
};

template <class C>
__device__ __forceinline__ void produce(const Maps& maps, const Shape& shape, const Shared<C>& smem, const Walk<C>& walk) {
  constexpr int kShareB = C::kClusterM, kShareA = C::kClusterN;
  const int first_rank = walk.split * C::kClusterM * C::kClusterN;
  uint16_t mask_a = 0;
#pragma unroll
  for (int i = 0; i < kShareA; ++i) mask_a |= 1 << (first_rank + i * C::kClusterM + walk.cluster_m);
  const uint16_t mask_b = ((1 << kShareB) - 1) << (first_rank + walk.cluster_n * C::kClusterM);
  Ring<C> ring;
  for (int tile = walk.first(); tile < walk.count(); tile += walk.clusters) {
    int m, n;
    walk.origin(tile, shape.raster, m, n);
    for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
      const uint32_t full = smem.full(ring.stage);
      barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
      barrier_arrive_expect(full, C::kBytesA + C::kBytesB);
      if constexpr (kShareA == 1) {
        tma_load(smem.a(ring.stage), &maps.x, full, k * C::BK, m);
      } else {
        const int part = walk.cluster_n * (C::BM / kShareA);
        tma_load_multicast(smem.a(ring.stage) + part * kStageBytes, &maps.x, full, mask_a, k * C::BK, m + part);
      }
      if constexpr (C::Finish::kGated) {
        tma_load(smem.b(ring.stage), &maps.w, full, k * C::BK, 0, 0, n / 16);
      } else if constexpr (kShareB == 1) {
        tma_load(smem.b(ring.stage), &maps.w, full, k * C::BK, n);
      } else {
        const int part = walk.cluster_m * (C::BN / kShareB);
        tma_load_multicast(smem.b(ring.stage) + part * kStageBytes, &maps.w, full, mask_b, k * C::BK, n + part);
      }
    }
  }
}

// One warp: {scale, bias} of the tile's columns, as pairs of floats in shared memory.
template <class C>
__device__ __forceinline__ void produce_columns(const Shape& shape, const gemm::EpilogueParams& e, const Shared<C>& smem,
                                                const Walk<C>& walk) {
  constexpr int kLoads = (C::BN + 31) / 32;
  uint32_t phase = 1;
  int turn = 0;
  for (int tile = walk.first(); tile < walk.count(); tile += walk.clusters) {
    int m, n;
    walk.origin(tile, shape.raster, m, n);
    float scale[kLoads], bias[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      int column = n + 32 * i + static_cast<int>(threadIdx.x % 32);
      const bool inside = column < shape.n;
      // Sums of the gate and of the up projection alternate by 8 columns.
      if constexpr (C::Finish::kGated) column = column / 16 * 8 + column % 8 + (column & 8 ? shape.n / 2 : 0);
      scale[i] = e.column_scale && inside ? e.column_scale[static_cast<int64_t>(column) * e.column_scale_step] : 1.f;
      bias[i] = e.bias && inside ? to_float(static_cast<const typename C::Out*>(e.bias)[column]) : 0.f;
    }
    barrier_wait(smem.columns_empty(turn), phase);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (C::BN % 32 != 0 && 32 * i + threadIdx.x % 32 >= C::BN) continue;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem.columns(turn) + 8 * (32 * i + threadIdx.x % 32)), "f"(scale[i]),
                   "f"(bias[i])
                   : "memory");
    }
    barrier_arrive(smem.columns_full(turn));
    if (++turn == C::kTiles) {
      turn = 0;
      phase ^= 1;
    }
  }
}

// Arrives at the barrier at the same address in another CTA. Without `.release.cluster`: nothing that this thread wrote has to be seen
// there (wgmma has read the stage, and that is over), and the fence for it costs more than the stage.
__device__ __forceinline__ void arrive_at(uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// The stage has been read by this warp: tell every CTA that fills it.
template <class C>
__device__ __forceinline__ void release(uint32_t empty, const Walk<C>& walk) {
  constexpr int kTargets = C::kClusterM + C::kClusterN - 1;
  const int lane = threadIdx.x % 32;
  if constexpr (kTargets == 1) {
    if (lane == 0) barrier_arrive(empty);
  } else {
    if (lane < kTargets) {
      const int first_rank = walk.split * C::kClusterM * C::kClusterN;
      const int along_m = lane, along_n = (lane - C::kClusterM) + ((lane - C::kClusterM) >= walk.cluster_n);
      const int rank = lane < C::kClusterM ? walk.cluster_n * C::kClusterM + along_m : along_n * C::kClusterM + walk.cluster_m;
      arrive_at(empty, first_rank + rank);
    }
  }
}

}  // namespace pyllm::dense
