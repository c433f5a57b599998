// Stable counting sort of (token, expert) pairs by expert, and the grouped GEMM's list of tiles: one launch, no atomics, so the order is
// always (expert, token, choice).
//
// Warps own consecutive pieces of the pairs. Each counts its experts (a row of the histogram of its own), a scan over the warps and one
// over the experts give each (warp, expert) its first place, and a second pass hands the places out in order. Up to 8 CTAs of a cluster
// share the pairs: each reads the others' totals through distributed shared memory. Every CTA knows all offsets then; the first writes
// the tiles.
#pragma once
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "moe/sort_experts.h"

namespace pyllm::moe {

constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / 32;
constexpr int kAhead = 4;         // loads of a lane in flight
constexpr int kGroupRows = 1024;  // of x that go over an expert's weight together: they share it in the L2
constexpr int kMaxGroup = 64;     // tiles

__device__ __forceinline__ int load_remote(const int* mine, int rank) {
  uint32_t remote;
  int v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(v) : "r"(remote) : "memory");
  return v;
}

// Inclusive sums of two numbers over the first threads of the CTA, those of experts.
__device__ __forceinline__ int2 scan(int2 v, int experts, int2 (&sums)[kSortWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int x = __shfl_up_sync(~0u, v.x, d), y = __shfl_up_sync(~0u, v.y, d);
    if (lane >= d) v.x += x, v.y += y;
  }
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  if (warp * 32 < experts) {
    for (int w = 0; w < warp; ++w) v.x += sums[w].x, v.y += sums[w].y;
  }
  return v;
}

// The lanes of this warp whose pair has the same expert e; a negative one is none. A ballot for each bit of an expert: match_any takes the
// whole SM about 60 clocks a time.
__device__ __forceinline__ uint32_t lanes_of(int e, int bits) {
  uint32_t same = __ballot_sync(~0u, e >= 0);
  for (int b = 0; b < bits; ++b) {
    const bool bit = e >> b & 1;
    const uint32_t set = __ballot_sync(~0u, bit);
    same &= bit ? set : ~set;
  }
  return same;
}

// Calls f(pair, expert) for this lane's pairs of [begin, end), all lanes together; -1 behind the end and for experts that do not exist.
template <class F>
__device__ __forceinline__ void each_pair(const SortParams& p, int begin, int end, F&& f) {
  for (int from = begin + static_cast<int>(threadIdx.x) % 32; from - static_cast<int>(threadIdx.x) % 32 < end; from += 32 * kAhead) {
    int e[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      e[j] = from + 32 * j < end ? __ldcg(p.ids + from + 32 * j) : -1;
      if (static_cast<uint32_t>(e[j]) >= static_cast<uint32_t>(p.experts)) e[j] = -1;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (from - static_cast<int>(threadIdx.x) % 32 + 32 * j < end) f(from + 32 * j, e[j]);
    }
  }
}

__device__ __forceinline__ void write_tiles(const SortParams& p, int expert, int offset, int rows, int first, int tiles) {
  const int group = min(kMaxGroup, max(1, kGroupRows / p.tile_rows));
  for (int t = 0; t < tiles; ++t) {
    const int start = t / group * group;
    const uint32_t size = min(group, tiles - start);
    p.tiles[first + t] = {expert, offset + start * p.tile_rows, offset + rows, static_cast<uint32_t>(first + start) | size << 24};
  }
}

__global__ void __launch_bounds__(kSortThreads, 1) sort_kernel(const __grid_constant__ SortParams p, int warps, int piece) {
  extern __shared__ int histogram[];  // [warps][experts], then [experts] totals of this CTA, then [experts] first places
  __shared__ int2 sums[kSortWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = static_cast<int>(cluster_rank()), ctas = gridDim.x;
  int *totals = histogram + warps * p.experts, *places = totals + p.experts;
  for (int i = threadIdx.x; i < warps * p.experts; i += kSortThreads) histogram[i] = 0;
  const int bits = 32 - __clz(p.experts - 1);  // of an expert's number
  __syncthreads();
  pdl_trigger();
  pdl_wait();
  const int begin = (rank * warps + warp) * piece, end = min(begin + piece, static_cast<int>(p.pairs));
  int* mine = histogram + warp * p.experts;
  if (warp < warps) {
    each_pair(p, begin, end, [&](int, int expert) {
      const uint32_t same = lanes_of(expert, bits);
      if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
      __syncwarp();
    });
  }
  __syncthreads();
  const int e = threadIdx.x;
  if (e < p.experts) {
    int run = 0;
    for (int w = 0; w < warps; ++w) {
      const int here = histogram[w * p.experts + e];
      histogram[w * p.experts + e] = run;
      run += here;
    }
    totals[e] = run;
  }
  if (ctas > 1) cluster_sync();
  int rows = 0, before = 0;
  if (e < p.experts) {
    for (int r = 0; r < ctas; ++r) {
      const int there = ctas > 1 ? load_remote(totals + e, r) : totals[e];
      rows += there;
      before += r < rank ? there : 0;
    }
  }
  if (ctas > 1) cluster_arrive();  // totals have been read
  const int tiles = (rows + p.tile_rows - 1) / p.tile_rows;
  const int2 ends = scan({rows, tiles}, p.experts, sums);
  if (e < p.experts) places[e] = ends.x - rows + before;
  __syncthreads();
  if (rank == 0) {
    if (e < p.experts) write_tiles(p, e, ends.x - rows, rows, ends.y - tiles, tiles);
    if (e == p.experts - 1) *p.count = ends.y;
  }
  if (warp < warps) {
    each_pair(p, begin, end, [&](int pair, int expert) {
      const uint32_t same = lanes_of(expert, bits);
      const int place = expert < 0 ? -1 : places[expert] + mine[expert] + __popc(same & ((1u << lane) - 1));
      __syncwarp();
      if (expert >= 0 && lane == __ffs(same) - 1) mine[expert] += __popc(same);
      __syncwarp();
      if (pair < end) p.positions[pair] = place;
      if (place >= 0) p.rows[place] = static_cast<int>(static_cast<uint32_t>(pair) / static_cast<uint32_t>(p.top_k));
    });
  }
  if (ctas > 1) cluster_wait();
}

}  // namespace pyllm::moe
