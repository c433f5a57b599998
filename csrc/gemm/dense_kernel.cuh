// Dense GEMM for many rows (sm_90a): y[m, n] = epilogue(sum_k x[m, k] w[n, k]), both operands K-major.
//
// Roles: one warpgroup feeds (warp 0: TMA of x and w; warp 1: column scales and bias), one or two warpgroups multiply (wgmma out of
// shared memory, fp32 or int32 sums in registers) and store (registers -> stmatrix -> swizzled shared memory -> TMA store).
// A ring of stages of 128 bytes along K connects them: full[s] counts the bytes of TMA, empty[s] the warps that have read the stage.
// Persistent: CTAs walk over tiles, groups of kRaster tiles along M first, so that the tiles in flight share rows of x and w in L2.
// Clusters: CTAs with the same rows of w (kClusterM) or of x (kClusterN) load a part each and multicast it; kSplit CTAs share one
// output tile, each sums its part of K, and the parts are joined through distributed shared memory in a fixed order.
// Tails: TMA fills reads outside with zeros and drops writes outside.
#pragma once
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/vec.cuh"
#include "common/wgmma.cuh"
#include "gemm/dense.h"

namespace pyllm::dense {

constexpr int kStageBytes = 128;  // of one row of a stage: the span of the 128-byte swizzle
constexpr int kSmemPerSM = 227 * 1024;
constexpr int kReservedPerCta = 1024;

// How the products are summed: kPlain leaves the whole sum over K in the tensor core's accumulators (for e4m3 they keep about 14 bits
// of the products' alignment), kBlock takes each 128 columns of K out and adds them in fp32, times the scales of their blocks.
enum class Sums { kPlain, kBlock };

// How the multiplying warpgroups of an SM work: two halves of one tile; two tiles in turns, one storing while the other multiplies; or a
// CTA has one and the SM two CTAs, which drift apart by themselves.
enum class Way { kTogether, kTurns, kAlone };

template <class T_, class Out_, int BM_, int BN_, int ClusterM_, int ClusterN_, int Split_, Way Way_ = Way::kTogether,
          Sums Sums_ = Sums::kPlain>
struct Tile {
  using T = T_;
  using Out = Out_;
  using Sum = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;
  static constexpr int BM = BM_, BN = BN_, kClusterM = ClusterM_, kClusterN = ClusterN_, kSplit = Split_;
  static constexpr Sums kSums = Sums_;
  static constexpr Way kWay = Way_;
  static constexpr int BK = kStageBytes / sizeof(T);
  static constexpr int kConsumers = kWay == Way::kAlone ? 1 : 2;
  static constexpr int kSharers = kWay == Way::kTogether ? 2 : 1;  // warpgroups of one tile
  static constexpr int kTiles = kConsumers / kSharers;             // at a time
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kBlocksM = BM / (64 * kSharers);  // of 64 rows, per warpgroup
  static constexpr int R = BN / 2;                       // sums per thread and 64 rows
  static constexpr int kCluster = kClusterM * kClusterN * kSplit;
  static constexpr int kChunk = BN / kSplit % 64 == 0 ? 64 : 32;  // columns of one TMA store
  static constexpr int kChunkBytes = 64 * kChunk * sizeof(Out);
  static constexpr int kCtasPerSM = kWay == Way::kAlone ? 2 : 1;
  static constexpr int kChunkBuffers = kCtasPerSM == 2 && BM * BN >= 128 * 128 ? 1 : 2;
  static constexpr int kBytesA = BM * kStageBytes, kBytesB = BN * kStageBytes;
  static constexpr int kBytesC = kConsumers * kChunkBuffers * kChunkBytes;
  static constexpr int kBytesColumns = BN * 8;  // of one tile
  static constexpr int kTail = kBytesC + kTiles * kBytesColumns + 256;  // 256: barriers
  static constexpr int kBudget = (kSmemPerSM + kReservedPerCta) / kCtasPerSM - kReservedPerCta;
  static constexpr int kFit = (kBudget - kTail) / (kBytesA + kBytesB);
  static constexpr int kStages = kFit > 8 ? 8 : kFit;
  static constexpr int kSmem = kStages * (kBytesA + kBytesB) + kTail;
  // Registers of the two roles where an even share of 65536 (168, or 128 with two CTAs) is too few for the sums.
  static constexpr bool kMoveRegisters = kWay != Way::kAlone || kBlocksM * R + (kSums == Sums::kBlock ? R : 0) > 64;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 24, kConsumerRegisters = kConsumers == 2 ? 232 : 224;
  static_assert(kStages >= 3 && BM % 64 == 0 && BN % 32 == 0 && BN <= 256 && kCluster <= 8);
  static_assert((kSplit & (kSplit - 1)) == 0 && (BN / kSplit) % kChunk == 0, "each CTA of a split stores whole chunks");
  static_assert((kSplit - 1) * BM * (BN / kSplit) * 4 <= kStages * (kBytesA + kBytesB), "the parts of a split fit into the stages");
};

struct Maps {
  CUtensorMap x, w, y;
};

// What each role walks over: the tiles of this cluster, then its own place in them.
template <class C>
struct Walk {
  int tiles_m, tiles_n, clusters, cluster_m, cluster_n, split, k_begin, k_end;

  __device__ __forceinline__ explicit Walk(const DenseShape& s) {
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
__device__ __forceinline__ void produce(const Maps& maps, const DenseShape& shape, const Shared<C>& smem, const Walk<C>& walk) {
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
      if constexpr (kShareB == 1) {
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
__device__ __forceinline__ void produce_columns(const DenseShape& shape, const DenseEpilogue& e, const Shared<C>& smem,
                                                const Walk<C>& walk) {
  uint32_t phase = 1;
  int turn = 0;
  for (int tile = walk.first(); tile < walk.count(); tile += walk.clusters) {
    int m, n;
    walk.origin(tile, shape.raster, m, n);
    float scale[C::BN / 32], bias[C::BN / 32];
#pragma unroll
    for (int i = 0; i < C::BN / 32; ++i) {
      const int column = n + 32 * i + static_cast<int>(threadIdx.x % 32);
      const bool inside = column < shape.n;
      scale[i] = C::kSums == Sums::kPlain && e.column_scale && inside ? e.column_scale[static_cast<int64_t>(column) * e.column_scale_step] : 1.f;
      bias[i] = e.bias && inside ? to_float(static_cast<const typename C::Out*>(e.bias)[column]) : 0.f;
    }
    barrier_wait(smem.columns_empty(turn), phase);
#pragma unroll
    for (int i = 0; i < C::BN / 32; ++i) {
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem.columns(turn) + 8 * (32 * i + threadIdx.x % 32)), "f"(scale[i]), "f"(bias[i])
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
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(
                   barrier),
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

template <class C>
__device__ __forceinline__ void multiply(typename C::Sum (&d)[C::kBlocksM][C::R], const Shared<C>& smem, int share, int stage,
                                         bool accumulate) {
  const uint64_t a = smem_descriptor<SmemLayout::kSwizzle128>(smem.a(stage) + share * C::kBlocksM * 64 * kStageBytes, 8 * kStageBytes);
  const uint64_t b = smem_descriptor<SmemLayout::kSwizzle128>(smem.b(stage), 8 * kStageBytes);
#pragma unroll
  for (int k = 0; k < kStageBytes / 32; ++k) {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      Wgmma<C::BN>::template ss<typename C::T>(d[i], descriptor_step(a, i * 64 * kStageBytes + 32 * k), descriptor_step(b, 32 * k),
                                               accumulate || k > 0);
    }
  }
}

// Way::kTurns: a warpgroup waits for its stages only when the other has seen all of its own arrive, since a barrier tells only odd phases
// from even ones. The named barriers 3 and 4 pass the turn on.
template <class C>
__device__ __forceinline__ void take_turn() {
  if constexpr (C::kWay == Way::kTurns) named_sync(2 + static_cast<int>(threadIdx.x / 128), 256);
}
template <class C>
__device__ __forceinline__ void pass_turn() {
  if constexpr (C::kWay == Way::kTurns) named_arrive(5 - static_cast<int>(threadIdx.x / 128), 256);
}

template <class C>
__device__ __forceinline__ void sum_plain(typename C::Sum (&d)[C::kBlocksM][C::R], const Shared<C>& smem, const Walk<C>& walk, int share,
                                          Ring<C>& ring) {
  uint32_t previous = 0;
  for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
    barrier_wait(smem.full(ring.stage), ring.phase);
    wgmma_fence();
    multiply<C>(d, smem, share, ring.stage, k > walk.k_begin);
    wgmma_commit();
    wgmma_wait<1>();
    if (k > walk.k_begin) release<C>(previous, walk);
    previous = smem.empty(ring.stage);
  }
  pass_turn<C>();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) wgmma_pin(d[i]);
  release<C>(previous, walk);
}

// Sums in fp32 of the products of each 128 columns of K, times the scales of their blocks of x (1x128) and w (128x128). The scales of the
// next block are on their way while this one is multiplied; while one warpgroup scales, the other keeps the tensor cores busy.
template <class C>
__device__ __forceinline__ void sum_blocks(float (&d)[C::kBlocksM][C::R], const DenseShape& shape, const DenseEpilogue& e, int m, int n,
                                           const Shared<C>& smem, const Walk<C>& walk, int share, Ring<C>& ring) {
  static_assert(C::BK == 128 && 128 % C::BN == 0, "a stage is one block, a tile has one scale of w");
  const int row = m + 16 * static_cast<int>(threadIdx.x / 32 % 4) + static_cast<int>(threadIdx.x % 32 / 4);
  const float* w_scale = e.column_scale + static_cast<int64_t>(min(n, shape.n - 1) / 128) * e.column_scale_step;
  const float* x_scale[C::kBlocksM][2];
  float next_w = w_scale[walk.k_begin], next_x[C::kBlocksM][2];
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x_scale[i][h] = e.row_scale + static_cast<int64_t>(min(row + 64 * i + 8 * h, shape.m - 1)) * e.row_scale_step;
      next_x[i][h] = x_scale[i][h][walk.k_begin];
    }
#pragma unroll
    for (int j = 0; j < C::R; ++j) d[i][j] = 0.f;
  }
  for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
    float scale[C::kBlocksM][2];
    const int after = min(k + 1, walk.k_end - 1);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        scale[i][h] = next_x[i][h] * next_w;
        next_x[i][h] = x_scale[i][h][after];
      }
    }
    next_w = w_scale[after];
    barrier_wait(smem.full(ring.stage), ring.phase);
    const uint64_t a =
        smem_descriptor<SmemLayout::kSwizzle128>(smem.a(ring.stage) + share * C::kBlocksM * 64 * kStageBytes, 8 * kStageBytes);
    const uint64_t b = smem_descriptor<SmemLayout::kSwizzle128>(smem.b(ring.stage), 8 * kStageBytes);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      float part[C::R];
      wgmma_pin(part);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < kStageBytes / 32; ++s) {
        Wgmma<C::BN>::template ss<typename C::T>(part, descriptor_step(a, i * 64 * kStageBytes + 32 * s), descriptor_step(b, 32 * s), s > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(part);
      if (i == C::kBlocksM - 1) release<C>(smem.empty(ring.stage), walk);
#pragma unroll
      for (int j = 0; j < C::R; ++j) d[i][j] = fmaf(part[j], scale[i][j / 2 % 2], d[i][j]);
    }
  }
}

// The address of this CTA's shared memory in another CTA of the cluster.
__device__ __forceinline__ uint32_t shared_of(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
__device__ __forceinline__ void store_remote(uint32_t to, const float* v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t to, const int* v) {
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[4], uint32_t from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from));
}
__device__ __forceinline__ void load_shared(int (&v)[4], uint32_t from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from));
}

// The parts of a split. Parts of d trade places so that part p holds the columns of CTA (split ^ p): part 0 stays here, the others are
// sent to their owners, who add what they receive in the order of p. Returns the sums of columns [split BN / kSplit, ...) in part 0.
// (Swaps by select, not branches on the split: the compiler joins those into one with a run-time register index, out of local memory.)
template <class C>
__device__ __forceinline__ void join_split(typename C::Sum (&d)[C::kBlocksM][C::R], const Shared<C>& smem, const Walk<C>& walk) {
  using Sum = typename C::Sum;
  constexpr int kLine = 128 * C::kConsumers * 16;  // 16 bytes of each thread
  constexpr int kOwn = C::R / C::kSplit, kPart = kLine / 4 * C::kBlocksM * kOwn;
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int bit = 1; bit < C::kSplit; bit *= 2) {
      const bool swap = walk.split & bit;
#pragma unroll
      for (int j = 0; j < C::R; ++j) {
        const int other = j + bit * kOwn;
        if (j / kOwn & bit) continue;
        const Sum low = d[i][j], high = d[i][other];
        d[i][j] = swap ? high : low;
        d[i][other] = swap ? low : high;
      }
    }
  }
  const uint32_t mine = smem.base + (threadIdx.x - 128) * 16;
  constexpr int kPeers = C::kClusterM * C::kClusterN;
  const int inside = static_cast<int>(cluster_rank()) % kPeers;
  cluster_sync();  // nobody's stages are in use any more
#pragma unroll
  for (int p = 1; p < C::kSplit; ++p) {
    const uint32_t to = shared_of(mine + (p - 1) * kPart, inside + (walk.split ^ p) * kPeers);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; j += 4) store_remote(to + (i * kOwn + j) / 4 * kLine, &d[i][p * kOwn + j]);
    }
  }
  cluster_sync();
#pragma unroll
  for (int p = 1; p < C::kSplit; ++p) {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; j += 4) {
        Sum part[4];
        load_shared(part, mine + (p - 1) * kPart + (i * kOwn + j) / 4 * kLine);
#pragma unroll
        for (int c = 0; c < 4; ++c) d[i][j + c] += part[c];
      }
    }
  }
}

template <class Out>
__device__ __forceinline__ uint32_t pack(float a, float b) {
  if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}

// One chunk of 64 rows x kChunk columns: scale, add, round, and hand it to TMA. `buffer` goes round those of this warpgroup.
template <class C>
__device__ __forceinline__ void store_chunk(const typename C::Sum* d, const float (&row_scale)[2], const Maps& maps, const Shared<C>& smem,
                                            int consumer, int turn, int& buffer, int local_n, int m, int n) {
  constexpr int kUnits = C::kChunk / 8;  // of 8 columns, 16 bytes
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t to = smem.c(consumer) + buffer * C::kChunkBytes;
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) store_wait_read<C::kChunkBuffers - 1>();
  named_sync(1 + consumer, 128);
  const int row = 16 * warp + lane % 16;
#pragma unroll
  for (int u = 0; u < kUnits; u += 2) {
    uint32_t packed[4];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      float s0, b0, s1, b1;
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(s0), "=f"(b0), "=f"(s1), "=f"(b1)
                   : "r"(smem.columns(turn) + 8 * (local_n + 8 * (u + v) + 2 * (lane % 4))));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float y0 = static_cast<float>(d[4 * (u + v) + 2 * h]) * row_scale[h], y1 = static_cast<float>(d[4 * (u + v) + 2 * h + 1]) * row_scale[h];
        packed[2 * v + h] = pack<typename C::Out>(fmaf(y0, s0, b0), fmaf(y1, s1, b1));
      }
    }
    const int unit = u + lane / 16;
    const int swizzled = C::kChunk == 64 ? unit ^ (row & 7) : unit ^ (row >> 1 & 3);
    store_matrix(to + row * C::kChunk * 2 + swizzled * 16, packed);
  }
  fence_async_shared();
  named_sync(1 + consumer, 128);
  if (leader) {
    tma_store(&maps.y, to, n, m);
    store_commit();
  }
  buffer = (buffer + 1) % C::kChunkBuffers;
}

template <class C>
__device__ __forceinline__ void consume(const Maps& maps, const DenseShape& shape, const DenseEpilogue& e, const Shared<C>& smem,
                                        const Walk<C>& walk) {
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int share = consumer % C::kSharers, turn = C::kTiles > 1 ? consumer : 0;
  Ring<C> ring;
  if (turn > 0) {
    pass_turn<C>();
    ring.skip(walk.k_end - walk.k_begin);
  }
  uint32_t columns_phase = 0;
  int buffer = 0;
  for (int tile = walk.first() + turn * walk.clusters; tile < walk.count(); tile += C::kTiles * walk.clusters, columns_phase ^= 1) {
    int m, n;
    walk.origin(tile, shape.raster, m, n);
    m += share * C::kBlocksM * 64;
    take_turn<C>();
    typename C::Sum d[C::kBlocksM][C::R];
    if constexpr (C::kSums == Sums::kBlock) {
      sum_blocks<C>(d, shape, e, m, n, smem, walk, share, ring);
    } else {
      sum_plain<C>(d, smem, walk, share, ring);
    }
    if constexpr (C::kTiles > 1) ring.skip((C::kTiles - 1) * (walk.k_end - walk.k_begin));
    if constexpr (C::kSplit > 1) join_split<C>(d, smem, walk);
    float row_scale[C::kBlocksM][2];
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = m + 64 * i + 16 * warp + 8 * h + lane / 4;
        row_scale[i][h] = C::kSums == Sums::kPlain && e.row_scale && row < shape.m ? e.row_scale[static_cast<int64_t>(row) * e.row_scale_step] : 1.f;
      }
    }
    barrier_wait(smem.columns_full(turn), columns_phase);
    constexpr int kChunks = C::BN / C::kChunk / C::kSplit;
    const int own = C::kSplit > 1 ? walk.split * (C::BN / C::kSplit) : 0;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int column = own + c * C::kChunk;
        store_chunk<C>(&d[i][c * C::kChunk / 2], row_scale[i], maps, smem, consumer, turn, buffer, column, m + 64 * i, n + column);
      }
    }
    if (lane == 0) barrier_arrive(smem.columns_empty(turn));
  }
  if (threadIdx.x % 128 == 0) store_wait<0>();
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSM)
    gemm(const __grid_constant__ Maps maps, const __grid_constant__ DenseShape shape, const __grid_constant__ DenseEpilogue epilogue) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> smem{smem_address(memory)};
  const Walk<C> walk(shape);
  const int warp = threadIdx.x / 32;
  if (warp == 0 && elect_one()) {
    prefetch_map(&maps.x);
    prefetch_map(&maps.w);
    prefetch_map(&maps.y);
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(smem.full(s), 1);
      barrier_init(smem.empty(s), (C::kClusterM + C::kClusterN - 1) * C::kSharers * 4);
    }
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
      barrier_init(smem.columns_full(t), 32);
      barrier_init(smem.columns_empty(t), C::kSharers * 4);
    }
    barrier_init_fence();
  }
  C::kCluster > 1 ? cluster_sync() : __syncthreads();
  pdl_wait();
  if (warp < 4) {
    if constexpr (C::kMoveRegisters) registers_down<C::kProducerRegisters>();
    if (warp == 0) {
      if (elect_one()) produce<C>(maps, shape, smem, walk);
      __syncwarp();
    } else if (warp == 1) {
      produce_columns<C>(shape, epilogue, smem, walk);
    }
    pdl_trigger();
    if constexpr (C::kSplit > 1) {
      __syncwarp();
      cluster_sync();
      cluster_sync();
    }
  } else {
    if constexpr (C::kMoveRegisters) registers_up<C::kConsumerRegisters>();
    consume<C>(maps, shape, epilogue, smem, walk);
  }
  // Peers may still multicast into this CTA, arrive at its barriers or write their parts: nobody leaves before all are done.
  if constexpr (C::kCluster > 1) cluster_sync();
}

}  // namespace pyllm::dense
