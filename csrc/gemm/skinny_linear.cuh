// y[m, n] = epilogue(sum_k x[m, k] w[n, k]) for M <= 64: a stream of the weights at memory speed.
//
// The weights are the 64-row side of wgmma (A), the rows of x its N side (B): M = 1 costs an N of 8. One thread feeds a ring of
// TMA boxes of the weights and one of x, two warpgroups multiply. About half of an SM's shared memory is taken, so that the next
// kernel's CTAs fit beside this one: they are let in when the last load of the weights is issued, and load their own weights, which no
// kernel writes, before they wait for this one. So memory stays busy over the tail of one GEMM and the start of the next.
//
// Norm: y = rstd[m] sum_k round(x[m, k] norm_weight[k]) w[n, k], RMSNorm with its row's factor moved behind the product, so that no pass
// over x stands before it: the consumers scale each unit of x in place and sum its squares.
//
// Order of a sum: the units of K of one CTA in order, then the CTAs of the cluster in order. It depends on N and K, not on M.
// Limits: base and rows of x and w at multiples of 16 bytes.
#pragma once
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/shared_access.cuh"
#include "common/wgmma.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/skinny_plan.h"

namespace pyllm::gemm {

constexpr int kSkinnyGroups = 2;  // consumer warpgroups
constexpr int kSkinnyThreads = kSkinnyGroups * 128 + 32;
constexpr int kSlabBytes = 128;  // of a row: the swizzle's width
constexpr int kMaxStages = 64;

struct SkinnyArgs {
  void* out;
  int m, columns;  // of the output
  int rows;        // of w: columns, gated twice that
  int units;       // of K
  int split;       // CTAs of a cluster
  int block_rows, blocks, per_cluster;
  int w_stages, x_stages;
  int trigger_left;         // loads of the weights to go when the next kernel is let in
  const void* norm_weight;  // [K]; of kernels with Norm
  bool norm_fp32;
  float eps;
  int k;
  EpilogueParams epilogue;
};

// Shared memory: the weights' ring, x's ring, partial sums (rows <= 16: an area of their own; else the rings, once they are drained),
// the barriers. N: rows of x, padded; Slabs of 128 bytes make a unit.
template <int N, int Slabs, bool Norm>
struct SkinnyShape {
  // CTAs that an SM holds. Sums of 64 rows and what goes with them do not fit the 96 registers that two CTAs leave a thread.
  static constexpr int kCtas = N <= 32 ? 2 : 1;
  static constexpr int kShared = kCtas == 2 ? 113 * 1024 : 227 * 1024;  // of 228 KiB, 1 KiB of it reserved for each CTA
  static constexpr int kXUnit = N * kSlabBytes * Slabs;
  static constexpr int kXTarget = N <= 16 ? 16 * 1024 : N <= 32 ? 32 * 1024 : 64 * 1024;
  static constexpr int kXStages = kXTarget / kXUnit < 2 ? 2 : kXTarget / kXUnit > 8 ? 8 : kXTarget / kXUnit;
  static constexpr bool kOwnSums = N <= 16;
  static constexpr int kSumsPerBlock = N * kBlockRows * 4;  // of all ranks of a cluster: 64 / split rows each
  static constexpr int kSums = kOwnSums ? kTileBlocks * kSumsPerBlock : kSkinnyGroups * 4 * 8 * (16 + 4) * 4;
  static constexpr int kBarriers = 2 * 8 * (kMaxStages + kXStages) + 8;
  static constexpr int kStats = Norm ? (Slabs + 4) * N * 4 : 0;  // sums of squares: of the slabs, of the ranks
  static constexpr int kRing = (kShared - kXStages * kXUnit - kSums - kBarriers - kStats) / 1024 * 1024;
  static_assert(kOwnSums || kTileBlocks * kSumsPerBlock <= kRing + kXStages * kXUnit, "the sums fit the drained rings");
  static_assert(kRing >= 4 * kBlockRows * kSlabBytes * Slabs, "at least one unit of each block");
};

__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ uint32_t remote_address(uint32_t address, uint32_t cta) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
  return remote;
}
// Into another CTA of the cluster; the bytes count at its barrier. A cluster barrier that releases memory takes 1.1 us, this 0.4.
__device__ __forceinline__ void send(uint32_t address, uint32_t barrier, float x) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(x), "r"(barrier) : "memory");
}
__device__ __forceinline__ void send(uint32_t address, uint32_t barrier, float x, float y, float z, float w) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address), "f"(x), "f"(y),
               "f"(z), "f"(w), "r"(barrier)
               : "memory");
}
// Orders execution, not memory: what it guards is passed on by barriers of its own, or has been read already.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

template <class T, class Out, int N, int Slabs, bool Gated, bool Norm>
struct Skinny {
  using Shape = SkinnyShape<N, Slabs, Norm>;
  static constexpr int kItems = kSlabBytes / sizeof(T);  // elements of a slab
  static constexpr int kSums = N / 2;                    // accumulators of a thread and block
  static constexpr int kConsumers = kSkinnyGroups * 128;
  static constexpr int kChunks = (N * 8 * Slabs + kConsumers - 1) / kConsumers;  // 16-byte pieces of a unit of x per consumer

  const SkinnyArgs& a;
  uint32_t ring, x_ring, sums, w_full, w_empty, x_full, x_empty, landed, stats;  // shared addresses
  int rank, first, mine;                                                         // CTA of the cluster; first block and number of blocks

  __device__ __forceinline__ Skinny(const SkinnyArgs& args, uint32_t base) : a(args) {
    ring = base;
    x_ring = ring + Shape::kRing;
    sums = x_ring + Shape::kXStages * Shape::kXUnit;
    w_full = sums + Shape::kSums;
    w_empty = w_full + 8 * kMaxStages;
    x_full = w_empty + 8 * kMaxStages;
    x_empty = x_full + 8 * Shape::kXStages;
    landed = x_empty + 8 * Shape::kXStages;
    stats = landed + 8;
    rank = static_cast<int>(cluster_rank());
    first = static_cast<int>(blockIdx.x) / a.split * a.per_cluster;
    mine = min(a.per_cluster, a.blocks - first);
  }

  // One warp.
  __device__ __forceinline__ void init_barriers() const {
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < a.w_stages; i += 32) {
      barrier_init(w_full + 8 * i, 1);
      barrier_init(w_empty + 8 * i, 4 * kSkinnyGroups);
    }
    if (lane < a.x_stages) {
      barrier_init(x_full + 8 * lane, 1);
      barrier_init(x_empty + 8 * lane, 4 * kSkinnyGroups);
    }
    if (lane == 0) barrier_init(landed, 1);
    barrier_init_fence();
    if (lane == 0 && a.split > 1) barrier_arrive_expect(landed, mine * Shape::kSumsPerBlock + (Norm ? a.split * N * 4 : 0));
  }

  struct WeightLoads {
    int tile = 0, unit, block = 0, left;
    RingPosition at;
  };
  struct XLoads {
    int tile = 0, unit;
    RingPosition at;
  };

  __device__ __forceinline__ bool ready(const WeightLoads& w) const {
    return w.tile < mine && barrier_test(w_empty + 8 * w.at.stage, w.at.parity ^ 1);
  }
  __device__ __forceinline__ bool ready(const XLoads& x) const {
    return x.tile < mine && barrier_test(x_empty + 8 * x.at.stage, x.at.parity ^ 1);
  }

  __device__ __forceinline__ void load(WeightLoads& w, const CUtensorMap* map) const {
    if (w.left-- == a.trigger_left) pdl_trigger();
    const uint32_t slab = a.block_rows * kSlabBytes;
    const uint32_t full = w_full + 8 * w.at.stage, to = ring + w.at.stage * slab * Slabs;
    const int row = (first + w.tile + w.block) * a.block_rows;
    barrier_arrive_expect(full, slab * Slabs);
#pragma unroll
    for (int s = 0; s < Slabs; ++s) {
      const int k = (w.unit * Slabs + s) * kItems;
      if constexpr (Gated) {
        tma_load(to + s * slab, map, full, k, 0, 0, row / 16);
      } else {
        tma_load(to + s * slab, map, full, k, row);
      }
    }
    w.at.advance(a.w_stages);
    if (++w.block < min(kTileBlocks, mine - w.tile)) return;
    w.block = 0;
    w.unit += a.split;
    if (w.unit < a.units) return;
    w.unit = rank;
    w.tile += kTileBlocks;
  }

  __device__ __forceinline__ void load(XLoads& x, const CUtensorMap* map) const {
    const uint32_t full = x_full + 8 * x.at.stage, to = x_ring + x.at.stage * Shape::kXUnit;
    barrier_arrive_expect(full, Shape::kXUnit);
#pragma unroll
    for (int s = 0; s < Slabs; ++s) tma_load(to + s * N * kSlabBytes, map, full, (x.unit * Slabs + s) * kItems, 0);
    x.at.advance(a.x_stages);
    x.unit += a.split;
    if (x.unit < a.units) return;
    x.unit = rank;
    x.tile += kTileBlocks;
  }

  // One thread. The ring fills before the wait: no kernel writes weights.
  __device__ __forceinline__ void produce(const CUtensorMap* w_map, const CUtensorMap* x_map) const {
    WeightLoads w{.unit = rank, .left = mine * ((a.units - rank + a.split - 1) / a.split)};
    if (w.left < a.trigger_left) pdl_trigger();
    XLoads x{.unit = rank};
    prefetch_map(w_map);
    prefetch_map(x_map);
    while (ready(w)) load(w, w_map);
    pdl_wait();
    while (w.tile < mine || x.tile < mine) {
      if (ready(x)) load(x, x_map);
      if (ready(w)) load(w, w_map);
    }
  }

  // Starts acc (+)= one unit, for Width rows of x.
  template <int Width>
  __device__ __forceinline__ void start_product(float (&acc)[Width / 2], uint32_t w, uint32_t x, bool accumulate) const {
    const uint64_t wd = smem_descriptor<SmemLayout::kSwizzle128>(w, 8 * kSlabBytes);
    const uint64_t xd = smem_descriptor<SmemLayout::kSwizzle128>(x, 8 * kSlabBytes);
    const uint32_t slab = a.block_rows * kSlabBytes;
    wgmma_fence();
    wgmma_pin(acc);
#pragma unroll
    for (int s = 0; s < Slabs; ++s) {
#pragma unroll
      for (int k = 0; k < kSlabBytes; k += 32) {
        Wgmma<Width>::template ss<T>(acc, descriptor_step(wd, s * slab + k), descriptor_step(xd, s * N * kSlabBytes + k),
                                     accumulate || s + k > 0);
      }
    }
    wgmma_commit();
    wgmma_pin(acc);
  }

  // The tensor core keeps about 14 bits of a sum of e4m3 products: the sum of each unit is added in fp32, by at most 16 rows of x at a
  // time to bound the registers.
  // Returns with the product finished: a stage that waited for the next one before it is free would cost more than the overlap gains.
  __device__ __forceinline__ void accumulate(float (&acc)[kSums], uint32_t w, uint32_t x) const {
    if constexpr (sizeof(T) == 2) {
      start_product<N>(acc, w, x, true);
      wgmma_wait<0>();
      wgmma_pin(acc);
    } else {
      constexpr int kWidth = N < 16 ? N : 16;
#pragma unroll
      for (int part = 0; part < N / kWidth; ++part) {
        float fresh[kWidth / 2];
        start_product<kWidth>(fresh, w, x + part * kWidth * kSlabBytes, false);
        wgmma_wait<0>();
        wgmma_pin(fresh);
#pragma unroll
        for (int j = 0; j < kWidth / 2; ++j) acc[part * kWidth / 2 + j] += fresh[j];
      }
    }
  }

  // RMSNorm without its row's factor, in place: x becomes round(x * norm_weight), and the squares of x are summed beside it. A thread
  // has the same row and the same eight columns of each slab in every unit.
  __device__ __forceinline__ void normalise(uint32_t slot, int unit, float (&squares)[kChunks]) const {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int i = threadIdx.x + j * kConsumers, slab = i / (N * 8), m = i / 8 % N, piece = i % 8;
      const int k = (unit * Slabs + slab) * kItems + (piece ^ m % 8) * 8;
      if (slab < Slabs && k < a.k) {
        Vec<T, 8>& x = *reinterpret_cast<Vec<T, 8>*>(__cvta_shared_to_generic(slot + i * 16));
        Vec<T, 8> y = x;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float g[4];
          if (a.norm_fp32) {
            const float4 w = __ldg(static_cast<const float4*>(a.norm_weight) + k / 4 + half);
            g[0] = w.x, g[1] = w.y, g[2] = w.z, g[3] = w.w;
          } else {
            const Vec<T, 4> w = load_vec<T, 4>(static_cast<const T*>(a.norm_weight) + k + 4 * half);
#pragma unroll
            for (int e = 0; e < 4; ++e) g[e] = to_float(w[e]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float value = to_float(y[4 * half + e]);
            squares[j] = fmaf(value, value, squares[j]);
            y[4 * half + e] = from_float<T>(value * g[e]);
          }
        }
        x = y;
      }
      asm volatile("" ::: "memory");  // one piece at a time: registers
    }
    fence_async_shared();
    named_sync(1, kConsumers);
  }

  // Brings this CTA's norm weights to the L1 while the predecessor still runs: no kernel writes them.
  __device__ __forceinline__ void touch_norm_weight() const {
    const int item = a.norm_fp32 ? 4 : static_cast<int>(sizeof(T));
    const char* base = static_cast<const char*>(a.norm_weight);
    for (int unit = rank + a.split * (threadIdx.x / 32); unit < a.units; unit += a.split * (kConsumers / 32)) {
      const int64_t from = static_cast<int64_t>(unit) * Slabs * kItems * item + threadIdx.x % 32 * 32;
      if (threadIdx.x % 32 * 32 < Slabs * kItems * item && from < static_cast<int64_t>(a.k) * item) {
        uint32_t word;
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(base + from));
      }
    }
  }

  // The sum of squares of each row over this CTA's part of K, to `to` (a rank's place in the statistics of each CTA).
  __device__ __forceinline__ void share_squares(const float (&squares)[kChunks]) const {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int i = threadIdx.x + j * kConsumers;
      float sum = squares[j];
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (i < N * 8 * Slabs && i % 8 == 0) store_shared_float(stats + i / 8 * 4, sum);
    }
    named_sync(1, kConsumers);
    if (threadIdx.x < N) {
      float sum = 0.f;
#pragma unroll
      for (int s = 0; s < Slabs; ++s) sum += load_shared_float(stats + (s * N + threadIdx.x) * 4);
      const uint32_t own = stats + (Slabs * N + rank * N + threadIdx.x) * 4;
      if (a.split == 1) {
        store_shared_float(own, sum);
      } else {
        for (int r = 0; r < a.split; ++r) send(remote_address(own, r), remote_address(landed, r), sum);
      }
    }
    if (a.split == 1) named_sync(1, kConsumers);
  }

  __device__ __forceinline__ float row_factor(int m) const {
    if constexpr (!Norm) return 1.f;
    float sum = 0.f;
    for (int r = 0; r < a.split; ++r) sum += load_shared_float(stats + (Slabs * N + r * N + m) * 4);
    return rsqrtf(sum / static_cast<float>(a.k) + a.eps);
  }

  __device__ __forceinline__ void consume() const {
    const int group = threadIdx.x / 128;
    const bool leader = threadIdx.x % 32 == 0;
    RingPosition wp, xp;
    for (int tile = 0; tile < mine; tile += kTileBlocks) {
      const int blocks = min(kTileBlocks, mine - tile);
      float acc[2][kSums] = {}, squares[kChunks] = {};
      for (int unit = rank; unit < a.units; unit += a.split) {
        barrier_wait(x_full + 8 * xp.stage, xp.parity);
        if constexpr (Norm) normalise(x_ring + xp.stage * Shape::kXUnit, unit, squares);
        // Each warpgroup passes all blocks, so that it sees every phase of every barrier, and multiplies every other one.
#pragma unroll
        for (int block = 0; block < kTileBlocks; ++block) {
          if (block < blocks) {
            barrier_wait(w_full + 8 * wp.stage, wp.parity);
            if (block % kSkinnyGroups == group) {
              accumulate(acc[block / kSkinnyGroups], ring + wp.stage * (a.block_rows * kSlabBytes * Slabs),
                         x_ring + xp.stage * Shape::kXUnit);
            }
            if (leader) barrier_arrive(w_empty + 8 * wp.stage);
            wp.advance(a.w_stages);
          }
        }
        if (leader) barrier_arrive(x_empty + 8 * xp.stage);
        xp.advance(a.x_stages);
      }
      if (a.split == 1) {
        if constexpr (Norm) share_squares(squares);
        store_own(acc, tile, blocks);
      } else {
        exchange(acc, squares, blocks);
      }
    }
  }

  // One thread's four neighbouring rows of w (gated: and the four of the up half) for row m of x.
  __device__ __forceinline__ void store(float (&v)[4], float (&up)[4], int m, int row) const {
    const Epilogue<Out, 4> epilogue{a.epilogue};
    const int n = Gated ? row / 16 * 8 + row % 16 : row;
    const int count = min(4, a.columns - n);
    if (m >= a.m || count <= 0) return;
    if constexpr (Norm) {
      const float factor = row_factor(m);
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] *= factor, up[e] *= factor;
    }
    epilogue.scale(v, m, n, count);
    if constexpr (Gated) {
      epilogue.scale(up, m, a.columns + n, count);
      epilogue.gate(v, up);
    } else {
      epilogue.activate(v);
    }
    epilogue.finish(v, m, n, count);
    store_columns(static_cast<Out*>(a.out) + static_cast<int64_t>(m) * a.columns + n, v, count, a.columns % 4 == 0);
  }

  // No partners: each warp turns its 16 rows x 8 columns through shared memory of its own, 20 floats a column.
  __device__ __forceinline__ void store_own(const float (&acc)[2][kSums], int tile, int blocks) const {
    constexpr int kPitch = 16 + 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
    float* own = reinterpret_cast<float*>(__cvta_shared_to_generic(sums + threadIdx.x / 32 * 8 * kPitch * 4));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (group + 2 * i >= blocks) continue;
      const int row0 = (first + tile + group + 2 * i) * a.block_rows;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          own[(2 * (lane % 4)) * kPitch + lane / 4 + 8 * h] = acc[i][4 * j + 2 * h];
          own[(2 * (lane % 4) + 1) * kPitch + lane / 4 + 8 * h] = acc[i][4 * j + 2 * h + 1];
        }
        __syncwarp();
        constexpr int kQuads = Gated ? 2 : 4;
        const int quad = lane % kQuads, m = lane / kQuads;
        if (m < 8) {
          float v[4], up[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            v[e] = own[m * kPitch + 4 * quad + e];
            up[e] = Gated ? own[m * kPitch + 4 * quad + 8 + e] : 0.f;
          }
          const int row = 16 * warp + 4 * quad;
          if (row < a.block_rows) store(v, up, 8 * j + m, row0 + row);
        }
        __syncwarp();
      }
    }
  }

  // Each CTA of the cluster finishes 64 / split rows of each block: it gets them from all, and adds them in the order of the ranks.
  // They travel and lie as fragments: for each block, rank, 16 rows and 8 columns the four sums of each lane.
  __device__ __forceinline__ void exchange(const float (&acc)[2][kSums], const float (&squares)[kChunks], int blocks) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
    const int log_split = a.split / 2, log_parts = 2 - log_split;  // parts of 16 rows in a rank's piece of a block
    const uint32_t area = Shape::kOwnSums ? sums : ring;
    if constexpr (!Shape::kOwnSums) cluster_arrive_relaxed();
    cluster_wait();  // every CTA runs, and where the rings are the area: has drained them
    if constexpr (Norm) share_squares(squares);
    const int owner = warp >> log_parts, part = warp & ((1 << log_parts) - 1);
    const uint32_t to = remote_address(area, owner) + ((rank << log_parts) + part) * (N * 64) + lane * 16;
    const uint32_t barrier = remote_address(landed, owner);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (group + 2 * i >= blocks) continue;
#pragma unroll
      for (int j = 0; j < kSums; j += 4) {
        send(to + (group + 2 * i) * Shape::kSumsPerBlock + j * 128, barrier, acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]);
      }
    }
    barrier_wait(landed, 0);
    finish(area, blocks, log_split);
  }

  __device__ __forceinline__ void finish(uint32_t area, int blocks, int log_split) const {
    const int log_quads = (Gated ? 3 : 4) - log_split, log_parts = 2 - log_split;
    for (int item = threadIdx.x; item < (blocks * N) << log_quads; item += kConsumers) {
      const int quad = item & ((1 << log_quads) - 1), m = (item >> log_quads) % N, block = (item >> log_quads) / N;
      const int local = Gated ? quad / 2 * 16 + quad % 2 * 4 : 4 * quad, row = local % 16;
      uint32_t from = area + block * Shape::kSumsPerBlock + local / 16 * (N * 64) + m / 8 * 512 + row % 8 * 64 + m % 8 / 2 * 16 +
                      row / 8 * 8 + m % 2 * 4;
      float v[4] = {}, up[4] = {};
      for (int r = 0; r < a.split; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          v[e] += load_shared_float(from + e * 64);
          if constexpr (Gated) up[e] += load_shared_float(from + e * 64 + 8);
        }
        from += N * 64 << log_parts;
      }
      const int piece = rank * (kBlockRows >> log_split) + local;
      if (piece < a.block_rows) store(v, up, m, (first + block) * a.block_rows + piece);
    }
  }
};

template <class T, class Out, int N, int Slabs, bool Gated, bool Norm>
__global__ void __launch_bounds__(kSkinnyThreads, SkinnyShape<N, Slabs, Norm>::kCtas)
    skinny_linear_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                         const __grid_constant__ SkinnyArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using S = Skinny<T, Out, N, Slabs, Gated, Norm>;
  const S skinny(args, smem_address(shared));
  const int warp = threadIdx.x / 32;
  if (warp == 4 * kSkinnyGroups) skinny.init_barriers();
  __syncthreads();
  if (SkinnyShape<N, Slabs, Norm>::kOwnSums && args.split > 1) cluster_arrive_relaxed();
  if (warp == 4 * kSkinnyGroups) {
    if (elect_one()) skinny.produce(&w_map, &x_map);
    __syncwarp();
  } else {
    if constexpr (Norm) skinny.touch_norm_weight();
    pdl_wait();  // for the residual and the scales, and before the first store
    skinny.consume();
  }
  if (args.split > 1 && warp == 4 * kSkinnyGroups) {
    if constexpr (!SkinnyShape<N, Slabs, Norm>::kOwnSums) cluster_arrive_relaxed();
    cluster_wait();
  }
}

}  // namespace pyllm::gemm
