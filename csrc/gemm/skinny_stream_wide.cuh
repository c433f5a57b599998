// y[m, n] = epilogue(sum_k x[m, k] w[n, k]) for up to 16 rows: the stream in which neither w nor x passes through registers.
//
// The weights are the 64-row side of wgmma, the rows of x its 16 columns (8 for up to 8). A CTA has an SM to itself, or half of it, and
// holds two engines: one thread that feeds a ring of boxes of the weights and one of boxes of x, and a warpgroup that multiplies. An engine
// takes every other unit of K (256 bytes, of some short rows 512) of all rows of its CTA in turn, and waits for nobody before the sums are
// added, once. So x is read once by a CTA, in pieces, and the rest of shared memory holds weights in flight.
//
// Split 2: two CTAs of a cluster share K and have twice the rows each, so that half of x is read; each of them adds the sums of half of the
// rows. Clusters of four start later than they gain (4096 x 4096 of bf16, 16 rows: 12.9 us, two 9.6, one 11.8).
//
// Order of a sum: the units of an engine in order (e4m3: each 256 bytes apart, since the tensor core keeps about 14 bits), then the
// engines. It depends on N, K and the GPU, not on M. Limits: base and rows of x and w at multiples of 16 bytes.
#pragma once
#include <type_traits>

#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/shared_access.cuh"
#include "common/wgmma.cuh"
#include "gemm/epilogue.cuh"

namespace pyllm::gemm {

constexpr int kWideRows = 16;  // of x at most
constexpr int kWideEngines = 2;
constexpr int kWideThreads = kWideEngines * (128 + 32);
constexpr int kWideSlab = 128;            // bytes of a row in a box: the span of the swizzle
constexpr int kWideUnit = 2 * kWideSlab;  // of weights, two boxes at a time: 128 bytes a row read up to 40 % slower
constexpr int kWideBlock = 64;            // rows of w of a wgmma
constexpr int kWideBlocks = 4;            // of a CTA at most
constexpr int kWideStages = 32;           // of a ring at most: a lane makes the barriers of each
constexpr int wide_x_unit(int rows) { return rows * kWideUnit; }
constexpr int wide_sums(int rows) { return kWideEngines * rows * kWideBlock * 4; }  // bytes, of a block, in a CTA that adds its share
constexpr int kWideBarriers = 16 + kWideEngines * 4 * kWideStages * 8;

struct WideArgs {
  void* out;
  int m, columns;
  int units;       // of K: as many bytes of a row as x is brought at a time, one or two times kWideUnit
  int log_split;   // of the CTAs of a cluster: 0, 1
  int block_rows;  // a multiple of 8, at most kWideBlock
  int w_stages, x_stages;
  int ahead;              // stages of weights asked for ahead of x
  bool early;             // the next kernel is let in at the start
  int x, sums, barriers;  // offsets in shared memory, behind the rings of weights
  EpilogueParams epilogue;
};

struct WideTurn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Rows of x, padded: the N side of wgmma. Times: kWideUnit in a unit of K.
template <class T, class Out, int Rows, int Blocks, int Times>
struct Wide {
  static constexpr int kItems = kWideSlab / static_cast<int>(sizeof(T)), kSlabs = kWideUnit / kWideSlab;
  static constexpr int kSums = Rows / 2;  // of a block and thread
  static constexpr int kXUnit = Times * wide_x_unit(Rows), kBlockSums = wide_sums(Rows);

  const WideArgs& a;
  const CUtensorMap *w_map, *x_map;
  int engine, first, step;      // unit of this engine, and distance to its next one
  int rank, row0, stage_bytes;  // row0: of w, the first of the cluster
  uint32_t w_ring, x_ring, w_full, w_empty, x_full, x_empty, landed, sums;

  __device__ __forceinline__ Wide(const WideArgs& args, const CUtensorMap* w, const CUtensorMap* x, uint32_t base, int e)
      : a(args), w_map(w), x_map(x), engine(e) {
    rank = a.log_split > 0 ? static_cast<int>(cluster_rank()) : 0;
    first = rank * kWideEngines + e, step = kWideEngines << a.log_split;
    row0 = (static_cast<int>(blockIdx.x) >> a.log_split) * Blocks * a.block_rows;
    stage_bytes = a.block_rows * kWideUnit;
    w_ring = base + e * a.w_stages * stage_bytes, x_ring = base + a.x + e * a.x_stages * kXUnit;
    landed = base + a.barriers, sums = base + a.sums;
    w_full = landed + 16 + e * 4 * kWideStages * 8, w_empty = w_full + kWideStages * 8;
    x_full = w_empty + kWideStages * 8, x_empty = x_full + kWideStages * 8;
  }

  // The warp that feeds an engine.
  __device__ __forceinline__ void init_barriers() const {
    const int lane = threadIdx.x % 32;
    if (lane < a.w_stages) barrier_init(w_full + 8 * lane, 1), barrier_init(w_empty + 8 * lane, 4);
    if (lane < a.x_stages) barrier_init(x_full + 8 * lane, 1), barrier_init(x_empty + 8 * lane, 4);
    if (engine == 0 && lane == 0) barrier_init(landed, 1);
    barrier_init_fence();
    if (engine == 0 && lane == 0) barrier_arrive_expect(landed, Blocks * kBlockSums);
    __syncwarp();
  }

  struct Weights {
    int unit, block = 0, time = 0, filled = 0;
  };

  __device__ __forceinline__ void load(Weights& w, int stage) const {
    const uint32_t slab = a.block_rows * kWideSlab, full = w_full + 8 * stage, to = w_ring + stage * stage_bytes;
    barrier_arrive_expect(full, stage_bytes);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
      tma_load(to + s * slab, w_map, full, ((w.unit * Times + w.time) * kSlabs + s) * kItems, row0 + w.block * a.block_rows);
    }
    if (++w.time < Times) return;
    w.time = 0;
    if (++w.block == Blocks) w.block = 0, w.unit += step;
  }
  __device__ __forceinline__ void load_x(int unit, int stage) const {
    const uint32_t full = x_full + 8 * stage, to = x_ring + stage * kXUnit;
    barrier_arrive_expect(full, kXUnit);
#pragma unroll
    for (int s = 0; s < Times * kSlabs; ++s) tma_load(to + s * Rows * kWideSlab, x_map, full, (unit * Times * kSlabs + s) * kItems, 0);
  }

  __device__ __forceinline__ void fill(Weights& w, int stages) const {
    for (; w.filled < stages && w.unit < a.units; ++w.filled) load(w, w.filled);
  }

  // One thread, once the kernel ahead may have written x. Copies are served about in the order in which they were asked for: x comes behind
  // no more weights than memory needs to stay busy.
  __device__ __forceinline__ void feed(Weights& w) const {
    int x = first;
    for (int i = 0; i < a.x_stages && x < a.units; ++i, x += step) load_x(x, i);
    fill(w, a.w_stages);
    bool more = w.unit < a.units;
    if (!more) pdl_trigger();
    WideTurn w_turn, x_turn;
    for (int unit = first; unit < a.units; unit += step) {
      for (int b = 0; more && b < Blocks * Times; ++b) {
        barrier_wait(w_empty + 8 * w_turn.stage, w_turn.parity);
        load(w, w_turn.stage);
        w_turn.next(a.w_stages);
        more = w.unit < a.units;
        if (!more) pdl_trigger();
      }
      if (x >= a.units) continue;
      barrier_wait(x_empty + 8 * x_turn.stage, x_turn.parity);
      load_x(x, x_turn.stage);
      x_turn.next(a.x_stages);
      x += step;
    }
  }

  // acc (+)= a unit of a block.
  __device__ __forceinline__ void product(float (&acc)[kSums], uint32_t w, uint32_t x, bool accumulate) const {
    const uint64_t wd = smem_descriptor<SmemLayout::kSwizzle128>(w, 8 * kWideSlab);
    const uint64_t xd = smem_descriptor<SmemLayout::kSwizzle128>(x, 8 * kWideSlab);
    const uint32_t slab = a.block_rows * kWideSlab;
    wgmma_fence();
    wgmma_pin(acc);
#pragma unroll
    for (int s = 0; s < kSlabs; ++s) {
#pragma unroll
      for (int k = 0; k < kWideSlab; k += 32) {
        Wgmma<Rows>::template ss<T>(acc, descriptor_step(wd, s * slab + k), descriptor_step(xd, s * Rows * kWideSlab + k),
                                    accumulate || s + k > 0);
      }
    }
    wgmma_commit();
    wgmma_pin(acc);
    wgmma_wait<0>();
    wgmma_pin(acc);
  }

  // A block of fewer than 64 rows is multiplied with what lies behind it too: a row of the result depends on no other row.
  __device__ __forceinline__ void multiply(float (&acc)[Blocks][kSums]) const {
    const bool leader = threadIdx.x % 32 == 0;
    WideTurn w_turn, x_turn;
    for (int unit = first; unit < a.units; unit += step) {
      const uint32_t x = x_ring + x_turn.stage * kXUnit;
      barrier_wait(x_full + 8 * x_turn.stage, x_turn.parity);
#pragma unroll
      for (int i = 0; i < Blocks * Times; ++i) {
        const int b = i / Times;
        barrier_wait(w_full + 8 * w_turn.stage, w_turn.parity);
        const uint32_t w = w_ring + w_turn.stage * stage_bytes, part = x + i % Times * (kXUnit / Times);
        if constexpr (sizeof(T) == 2) {
          product(acc[b], w, part, true);
        } else {
          float fresh[kSums];
          product(fresh, w, part, false);
#pragma unroll
          for (int j = 0; j < kSums; ++j) acc[b][j] += fresh[j];
        }
        if (leader) barrier_arrive(w_empty + 8 * w_turn.stage);
        w_turn.next(a.w_stages);
      }
      if (leader) barrier_arrive(x_empty + 8 * x_turn.stage);
      x_turn.next(a.x_stages);
    }
  }

  // The sums of a block lie as fragments: for each engine of the cluster and 16 of the rows that this CTA adds, the lanes' sums of eight
  // rows of x, then those of the other eight. Those of lanes 16 to 31, rows 4 to 7 and 12 to 15, are exchanged in fours, so that what a
  // warp reads at the end, one of each four rows for eight rows of x, lies in 32 banks: from four banks 28672 x 4096 of e4m3 took 30.1 us
  // instead of 29.2.
  __device__ __forceinline__ void exchange(const float (&acc)[Blocks][kSums]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int log_parts = 2 - a.log_split, owner = warp >> log_parts, part = warp & ((1 << log_parts) - 1);
    uint32_t to = sums + ((first << log_parts) + part) * (Rows * 64) + (lane ^ lane / 16 * 4) * 16, barrier = landed;
    if (a.log_split > 0) to = remote(to, owner), barrier = remote(barrier, owner);
#pragma unroll
    for (int b = 0; b < Blocks; ++b) {
#pragma unroll
      for (int j = 0; j < kSums; j += 4) {
        const uint32_t at = to + b * kBlockSums + j * 128;
        if (a.log_split > 0) {
          asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
                       "f"(acc[b][j]), "f"(acc[b][j + 1]), "f"(acc[b][j + 2]), "f"(acc[b][j + 3]), "r"(barrier)
                       : "memory");
        } else {
          asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(acc[b][j]), "f"(acc[b][j + 1]), "f"(acc[b][j + 2]),
                       "f"(acc[b][j + 3])
                       : "memory");
        }
      }
    }
    if (a.log_split > 0) {
      barrier_wait(landed, 0);
    } else {
      named_sync(1, kWideEngines * 128);
    }
  }
  static __device__ __forceinline__ uint32_t remote(uint32_t address, int cta) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
    return there;
  }

  // What one thread finishes: row m of x and four rows of w. Everything else that it needs is on its way to registers while the weights
  // stream: behind them a load takes microseconds. (Of residuals: where there are registers.)
  static constexpr bool kEarly = Blocks == 1;
  struct Item {
    int m, n, count;  // no columns: nothing to do
    uint32_t from;    // the sums of the first engine
    float row, column[4];
    unsigned short bias[4], residual[4];
  };

  __device__ __forceinline__ Item item(int index) const {
    const int log_parts = 2 - a.log_split, quad = index / 8 % 4, rest = index / 32, part = rest & ((1 << log_parts) - 1);
    const int eights = rest >> log_parts, block = eights / (Rows / 8), local = (rank << log_parts + 4) + 16 * part + 4 * quad;
    Item it{};
    it.m = eights % (Rows / 8) * 8 + index % 8, it.n = row0 + block * a.block_rows + local;
    it.count = block < Blocks && local < a.block_rows && it.m < a.m ? min(4, a.columns - it.n) : 0;
    it.from = sums + block * kBlockSums + part * (Rows * 64) + it.m / 8 * 512 + quad % 2 * (256 + 64) + quad / 2 * 8 + it.m % 8 / 2 * 16 +
              it.m % 2 * 4;
    return it;
  }
  __device__ __forceinline__ void load(Item& it) const {
    const EpilogueParams& p = a.epilogue;
    if (it.count > 0 && p.row_scale != nullptr) it.row = load_l2(p.row_scale + it.m * p.row_scale_step);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (e >= it.count) break;
      const int64_t n = it.n + e;
      if (p.column_scale != nullptr) it.column[e] = load_l2(p.column_scale + n * p.column_scale_step);
      if (p.bias != nullptr) it.bias[e] = load_l2(static_cast<const unsigned short*>(p.bias) + n);
      if (kEarly && p.residual != nullptr)
        it.residual[e] = load_l2(static_cast<const unsigned short*>(p.residual) + it.m * p.residual_stride + n);
    }
  }
  // What a kernel wrote that may have run beside this one is read past the L1.
  static __device__ __forceinline__ float load_l2(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
  }
  static __device__ __forceinline__ unsigned short load_l2(const unsigned short* from) {
    unsigned short x;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
    return x;
  }
  static __device__ __forceinline__ float value(const unsigned short& bits) { return to_float(reinterpret_cast<const Out&>(bits)); }

  __device__ __forceinline__ void finish(const Item& it) const {
    if (it.count <= 0) return;
    float v[4] = {};
    for (int e = 0; e < step; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] += load_shared_float((it.from + e * (Rows * 256 >> a.log_split)) ^ i * 64);
    }
    EpilogueParams rest = a.epilogue;
    if constexpr (kEarly) rest.residual = nullptr;
    const Epilogue<Out, 4> epilogue{rest};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (rest.row_scale != nullptr) v[i] *= it.row;
      if (rest.column_scale != nullptr) v[i] *= it.column[i];
      if (rest.bias != nullptr) v[i] += value(it.bias[i]);
    }
    epilogue.activate(v);
    epilogue.finish(v, it.m, it.n, it.count);
    if (kEarly && a.epilogue.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] += value(it.residual[i]);
    }
    store_columns(static_cast<Out*>(a.out) + static_cast<int64_t>(it.m) * a.columns + it.n, v, it.count, a.columns % 4 == 0);
  }
};

// Orders execution, not memory: what it guards is a barrier's start, which has a fence of its own.
__device__ __forceinline__ void wide_cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

template <class T, class Out, int Rows, int Blocks, int Times>
__global__ void __launch_bounds__(kWideThreads, Blocks <= 2 ? 2 : 1)
    skinny_wide_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ WideArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using W = Wide<T, Out, Rows, Blocks, Times>;
  const int warp = threadIdx.x / 32;
  const bool feeder = warp >= 4 * kWideEngines;
  if (args.early) pdl_trigger();
  const W wide(args, &w_map, &x_map, smem_address(shared), feeder ? warp - 4 * kWideEngines : warp / 4);
  typename W::Weights weights{wide.first};
  bool one = false;
  if (feeder) {
    wide.init_barriers();
    one = elect_one();
    if (one) wide.fill(weights, min(args.ahead, args.w_stages));
  } else if (threadIdx.x == 0) {
    prefetch_map(&x_map);
  }
  __syncthreads();
  if (args.log_split > 0) wide_cluster_arrive();
  if (feeder) {
    pdl_wait();
    if (one) wide.feed(weights);
    __syncwarp();
    if (args.log_split > 0) cluster_wait();
    return;
  }
  constexpr int kShare = kWideEngines * 128;
  typename W::Item items[Blocks];
#pragma unroll
  for (int i = 0; i < Blocks; ++i) items[i] = wide.item(threadIdx.x + i * kShare);
  pdl_wait();
#pragma unroll
  for (int i = 0; i < Blocks; ++i) wide.load(items[i]);
  float acc[Blocks][W::kSums] = {};
  wide.multiply(acc);
  if (args.log_split > 0) cluster_wait();  // the other CTA's barrier has been made
  wide.exchange(acc);
#pragma unroll
  for (int i = 0; i < Blocks; ++i) wide.finish(items[i]);
}

}  // namespace pyllm::gemm
