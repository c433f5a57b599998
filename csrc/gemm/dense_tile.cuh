// Dense GEMM, the parts that every kernel shares: tile shapes, shared memory, the walk over tiles, the warps that feed.
// dense_linear.cuh says how they work together.
#pragma once
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/vec.cuh"
#include "common/wgmma.cuh"
#include "gemm/epilogue_params.h"
#include "gemm/ring.cuh"

namespace pyllm::dense {

using gemm::Ring;

constexpr int kStageBytes = 128;  // of one row of a stage: the span of the 128-byte swizzle
constexpr int kBarrierBytes = 256;
constexpr int kSmemPerSm = 228 * 1024;  // of which each CTA takes 1 KB for itself

// How the products are summed: kPlain leaves the whole sum over K in the tensor core's accumulators (for e4m3 they keep about 14 bits
// of the products' alignment), kBlock takes each 128 columns of K out and adds them in fp32, times the scales of their blocks.
enum class Sums { kPlain, kBlock };

// How the two multiplying warpgroups work: on the halves of one tile, or each on its own tile in turns, one storing while the other
// multiplies.
enum class Way { kTogether, kTurns };

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

// Out: of bias and residual, and of the result unless that is stored as e4m3 (Stored).
template <class T_, class Out_, Way Way_, int BM_, int BN_, int Split_ = 1, class Finish_ = Linear, Sums Sums_ = Sums::kPlain,
          class Stored_ = Out_>
struct Tile {
  using T = T_;
  using Out = Out_;
  using Stored = Stored_;
  using Finish = Finish_;
  using Sum = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;
  static constexpr int BM = BM_, BN = BN_, kSplit = Split_;
  static constexpr Sums kSums = Sums_;
  static constexpr Way kWay = Way_;
  static constexpr int BK = kStageBytes / sizeof(T);
  // Warpgroups that multiply: one of tiles of 64 rows, which are for up to 64 rows of x (dense_few.cuh).
  static constexpr int kConsumers = kWay == Way::kTogether && BM == 64 ? 1 : 2;
  static constexpr int kSharers = kWay == Way::kTurns ? 1 : kConsumers;  // of one tile
  static constexpr int kTiles = kConsumers / kSharers;                   // at a time
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlocksM = BM / (64 * kSharers);  // of 64 rows, per warpgroup
  static constexpr int R = BN / 2;                       // sums per thread and 64 rows
  static constexpr bool kNarrow = sizeof(Stored) == 1;
  // Columns of sums of one TMA store. Of a gated product in e4m3 all: rows of 64 or 80 bytes, neither of which asks for a bank twice.
  static constexpr int kColumns = BN / kSplit;
  static constexpr int kChunk = kNarrow && Finish::kGated ? kColumns : kColumns % 64 == 0 ? 64 : kColumns % 32 == 0 ? 32 : 16;
  static constexpr int kChunkOut = Finish::kGated ? kChunk / 2 : kChunk;
  static constexpr int kChunkRow = kChunkOut * sizeof(Stored);  // bytes
  static constexpr int kChunkBytes = 64 * kChunkRow;
  static constexpr int kChunkBuffers = 2;
  static constexpr int kBytesA = BM * kStageBytes, kBytesB = BN * kStageBytes;
  static constexpr int kBytesC = kConsumers * kChunkBuffers * kChunkBytes;
  static constexpr int kBytesColumns = BN * 8;                              // of one tile
  static constexpr int kBytesJoin = (kSplit - 1) * BM * (BN / kSplit) * 4;  // what the other CTAs of a split send
  static constexpr int kTail = kBytesC + kTiles * kBytesColumns + kBytesJoin + kBarrierBytes;
  static constexpr int kFit = (kSmemPerSm - 1024 - kTail) / (kBytesA + kBytesB);
  static constexpr int kMostStages = BM == 64 ? 12 : 8;  // of few rows the stream of w counts: what is on its way
  static constexpr int kStages = kFit > kMostStages ? kMostStages : kFit;
  static constexpr int kRing = kStages * (kBytesA + kBytesB);
  static constexpr int kSmem = kRing + kTail;
  // 65536 registers among three warpgroups would be 168 per thread: too few for the sums.
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kStages >= 3 && BM % (64 * kSharers) == 0 && BN % 16 == 0 && BN <= 256 && kSplit <= 8);
  static_assert((kSplit & (kSplit - 1)) == 0 && (BN / kSplit) % kChunk == 0, "each CTA of a split stores whole chunks");
  static_assert(!Finish::kGated || kChunk >= 32, "a gated chunk holds two groups of 8 columns of both halves at least");
  static_assert(8 * (2 * kStages + 2 * kTiles + 1) <= kBarrierBytes);
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

// What each role walks over: the tiles of this CTA, or, of a split, of its cluster, and its part of K.
template <class C>
struct Walk {
  int tiles_m, tiles_n, step, split, k_begin, k_end;

  __device__ __forceinline__ explicit Walk(const Shape& s) {
    tiles_m = (s.m + C::BM - 1) / C::BM;
    tiles_n = (s.n + C::BN - 1) / C::BN;
    step = gridDim.x / C::kSplit;
    split = C::kSplit > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int steps = (s.k + C::BK - 1) / C::BK;
    k_begin = steps * split / C::kSplit;
    k_end = steps * (split + 1) / C::kSplit;
  }
  __device__ __forceinline__ int first() const { return blockIdx.x / C::kSplit; }
  __device__ __forceinline__ int count() const { return tiles_m * tiles_n; }
  // Rows and columns of a tile. Groups of `raster` tiles along M go over all of N before the next group.
  __device__ __forceinline__ void origin(int tile, int raster, int& m, int& n) const {
    const int group = tile / (raster * tiles_n), inside = tile - group * raster * tiles_n;
    const int rows = min(raster, tiles_m - group * raster);
    m = (group * raster + inside % rows) * C::BM;
    n = inside / rows * C::BN;
  }
};

template <class C>
struct Shared {
  uint32_t base;
  __device__ __forceinline__ uint32_t a(int stage) const { return base + stage * C::kBytesA; }
  __device__ __forceinline__ uint32_t b(int stage) const { return base + C::kStages * C::kBytesA + stage * C::kBytesB; }
  __device__ __forceinline__ uint32_t c(int consumer) const { return base + C::kRing + consumer * C::kChunkBuffers * C::kChunkBytes; }
  __device__ __forceinline__ uint32_t join() const { return c(C::kConsumers); }
  __device__ __forceinline__ uint32_t columns(int turn) const { return join() + C::kBytesJoin + turn * C::kBytesColumns; }
  __device__ __forceinline__ uint32_t full(int stage) const { return columns(C::kTiles) + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(C::kStages + stage); }
  __device__ __forceinline__ uint32_t columns_full(int turn) const { return full(2 * C::kStages + turn); }
  __device__ __forceinline__ uint32_t columns_empty(int turn) const { return full(2 * C::kStages + C::kTiles + turn); }
  __device__ __forceinline__ uint32_t landed() const { return full(2 * C::kStages + 2 * C::kTiles); }
};

// Of up to 64 rows of x those that exist are asked for, by eight; the others hold what was there, and TMA does not store them.
template <class C>
__device__ __forceinline__ int bytes_of_x(const Shape& shape) {
  return C::BM == 64 ? kStageBytes * min(64, (shape.m + 7) / 8 * 8) : C::kBytesA;
}

template <class C>
__device__ __forceinline__ void load_weights(const Maps& maps, const Shape& shape, const Shared<C>& smem, int stage, int k, int n) {
  const uint32_t full = smem.full(stage);
  barrier_arrive_expect(full, bytes_of_x<C>(shape) + C::kBytesB);
  if constexpr (C::Finish::kGated) {
    tma_load(smem.b(stage), &maps.w, full, k * C::BK, 0, 0, n / 16);
  } else {
    tma_load(smem.b(stage), &maps.w, full, k * C::BK, n);
  }
}

// Two stages of weights are asked for at once: memory reads 256 bytes of a row faster than 128 twice, and the stream of the weight is what
// few rows wait for. (By blocks: 6.2 us in place of 7.8 for one row of 4096 x 4096.)
template <class C>
__device__ __forceinline__ void produce_pair(const Maps& maps, const Shape& shape, const Shared<C>& smem, const Walk<C>& walk,
                                             Ring<C>& ring, int k, int first_new, int m, int n) {
  Ring<C> at = ring;
#pragma unroll
  for (int j = 0; j < 2; ++j, at.next()) {
    if (k + j >= walk.k_end || k + j < first_new) continue;
    barrier_wait(smem.empty(at.stage), at.phase ^ 1);
    load_weights<C>(maps, shape, smem, at.stage, k + j, n);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (k + j >= walk.k_end) break;
    tma_load(smem.a(ring.stage), &maps.x, smem.full(ring.stage), (k + j) * C::BK, m);
    ring.next();
  }
}

// No kernel of the stream writes the weights: the first ring of them is on its way before the wait for the kernels ahead.
template <class C>
__device__ __forceinline__ void produce(const Maps& maps, const Shape& shape, const Shared<C>& smem, const Walk<C>& walk) {
  int m, n;
  walk.origin(walk.first(), shape.raster, m, n);
  const int ahead = min(walk.k_begin + C::kStages, walk.k_end);
  for (int k = walk.k_begin; k < ahead; ++k) load_weights<C>(maps, shape, smem, k - walk.k_begin, k, n);
  pdl_wait();
  Ring<C> ring;
  for (int tile = walk.first(); tile < walk.count(); tile += walk.step) {
    walk.origin(tile, shape.raster, m, n);
    if constexpr (C::BM == 64) {
      for (int k = walk.k_begin; k < walk.k_end; k += 2) {
        produce_pair<C>(maps, shape, smem, walk, ring, k, tile == walk.first() ? ahead : walk.k_begin, m, n);
      }
    } else {
      for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
        if (tile != walk.first() || k >= ahead) {
          barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
          load_weights<C>(maps, shape, smem, ring.stage, k, n);
        }
        tma_load(smem.a(ring.stage), &maps.x, smem.full(ring.stage), k * C::BK, m);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ float bias_at(const gemm::EpilogueParams& e, int column) {
  if constexpr (C::kNarrow) {  // one kernel for models of bf16 and of fp16: the result is neither
    if (e.bias_fp16) return to_float(static_cast<const __half*>(e.bias)[column]);
  }
  return to_float(static_cast<const typename C::Out*>(e.bias)[column]);
}

// One warp: {scale, bias} of the tile's columns, as pairs of floats in shared memory.
template <class C>
__device__ __forceinline__ void produce_columns(const Shape& shape, const gemm::EpilogueParams& e, const Shared<C>& smem,
                                                const Walk<C>& walk) {
  constexpr int kLoads = (C::BN + 31) / 32;
  uint32_t phase = 1;
  int turn = 0;
  for (int tile = walk.first(); tile < walk.count(); tile += walk.step) {
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
      bias[i] = e.bias && inside ? bias_at<C>(e, column) : 0.f;
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

}  // namespace pyllm::dense
