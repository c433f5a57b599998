// How decode_attention is launched, from its shapes alone: a replayed graph meets other lengths.
#include <algorithm>
#include <atomic>
#include <bit>
#include <random>

#include "attention/decode_shape.cuh"
#include "common/launch.h"

namespace pyllm {
namespace {

// A number that no launch of any process had with any likelihood.
uint64_t next_stamp() {
  static const uint64_t seed = static_cast<uint64_t>(std::random_device{}()) << 32 | std::random_device{}();
  static std::atomic<uint64_t> count{1};
  uint64_t x = seed + count.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return (x ^ (x >> 31)) | 1;
}

struct Gpu {
  int sms = 1;
  int clusters[attention::kMaxClusterShift + 1] = {};  // how many of 2^i CTAs, each with an SM to itself, run at once
};

__global__ void __launch_bounds__(256, 1) probe_kernel() {}

Gpu find_gpu() {
  Gpu gpu;
  int device = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&gpu.sms, cudaDevAttrMultiProcessorCount, device);
  constexpr int kSmem = 160 * 1024;  // of which an SM has only one
  cudaFuncSetAttribute(probe_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  for (int shift = 0; shift <= attention::kMaxClusterShift; ++shift) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 1u << shift;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1u << shift);
    config.blockDim = dim3(256);
    config.dynamicSmemBytes = kSmem;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&gpu.clusters[shift], probe_kernel, &config) == cudaSuccess) continue;
    cudaGetLastError();
    gpu.clusters[shift] = 0;
  }
  return gpu;
}

uint32_t reciprocal(int x) { return x == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + x - 1) / x); }

// What follows from workers and clusters.
void finish_plan(DecodeAttentionParams& p) {
  p.share = reciprocal(p.workers);
  p.whole_share = reciprocal(p.whole_workers);
  const int64_t packets = 2 * p.dim / 16 * 32 + (attention::kRowTile << p.cluster_shift);
  p.workspace_bytes = std::max(p.workers * p.lanes, p.whole_workers) * p.row_tiles * packets * 16;
  p.stamp = next_stamp();
}

// Where whole segments leave SMs idle: the numbers from which on it is faster to cut them. Measured with 64 of 132 SMs at work (H200, 8 KV
// heads, one, two and four sequences): bf16 from 8k, 3k, 1.5k keys on, one byte from 7k, 3k, 1k. What a number costs goes with 1 / SMs.
int whole_numbers(const DecodeAttentionParams& p, const Gpu& gpu, int busy) {
  const int cost = p.cache == DecodeCache::kLikeQ ? 30 : 13;
  return static_cast<int>(int64_t{cost} * busy * gpu.sms / (gpu.sms - busy));
}

// Each warp is a worker.
void share_out_warps(DecodeAttentionParams& p, const Gpu& gpu) {
  p.stream = p.even = true;
  p.segment_cost = 2;
  const int slots = gpu.sms * attention::kStreamWarps, groups = slots / p.kv_heads;
  // Heads side by side, where that leaves no more than 1 in 64 warps without work.
  if (p.kv_heads > 1 && (slots - groups * p.kv_heads) * 64 <= slots) p.lanes = p.kv_heads;
  p.workers = slots / p.lanes;
  p.clusters = (p.workers * p.lanes + attention::kStreamWarps - 1) / attention::kStreamWarps;
}

// One CTA to a worker. A few less workers than fit, when equal segments then stay whole: 128 segments of an FP8 cache of 1k keys take 13.5
// us on as many SMs and 17.1 us on 132, 192 of them 19.6 us on as many CTAs of which two fit on an SM, 21.6 us on 132 that fill one. A
// 16-bit cache needs more of the CTAs at work.
void share_out_ctas(DecodeAttentionParams& p, const Gpu& gpu, int units) {
  const int fit = attention::decode_ctas(p.dim, p.row_tiles), least = p.cache == DecodeCache::kLikeQ ? 90 : 70;  // percent
  if (units * 100 >= gpu.sms * fit * least) p.ctas = fit;
  const bool mapped = p.k_page_stride > 0 && p.v_page_stride > 0;  // TMA knows no stride of 0
  if (p.ctas > 1 && mapped && units >= gpu.sms * (attention::kStreamWarps - 1)) return share_out_warps(p, gpu);
  const int slots = gpu.sms * p.ctas;
  const bool whole = units <= slots && units * 100 >= slots * (p.ctas == 1 ? 85 : least);
  p.clusters = p.workers = whole ? units : slots;
  p.even = true;
  // Heads side by side: an FP8 cache of 256 sequences of 1k keys 143 us instead of 147, a 16-bit one 260 instead of 264. Not where that
  // leaves more than 1 in 64 CTAs without work.
  const int groups = slots / p.kv_heads;
  if (whole || p.ctas == 1 || p.kv_heads == 1 || (slots - groups * p.kv_heads) * 64 > slots) return;
  p.lanes = p.kv_heads;
  p.workers = groups;
  p.clusters = groups * p.lanes;
}

// units: segments of sequences of usual_q rows.
void share_out(DecodeAttentionParams& p, const Gpu& gpu, int units) {
  // The largest clusters of which there is one for each segment: equal segments are not cut then.
  while (p.cluster_shift > 0 && gpu.clusters[p.cluster_shift] < units) --p.cluster_shift;
  p.cut_shift = p.cluster_shift;
  if (p.cluster_shift == 0) {
    share_out_ctas(p, gpu, units);
    return;
  }
  const int busy = units << p.cluster_shift;
  if (busy * 10 >= gpu.sms * 9) {
    p.clusters = p.workers = units;
    return;
  }
  p.clusters = gpu.clusters[p.cluster_shift];
  p.whole_workers = units;
  p.whole_below = whole_numbers(p, gpu, busy);
  int slots = p.clusters;
  if (2 * slots <= 8 * units) --p.cut_shift, slots *= 2;  // smaller workers come closer to the number of SMs, but each is a part to join
  p.workers = slots / units * units;
}

}  // namespace

void plan_decode_attention(DecodeAttentionParams& p) {
  static const Gpu gpu = find_gpu();
  const int rows = p.group * p.usual_q;
  p.row_tiles = rows > attention::kRowTile && p.dim <= attention::kNarrow ? 2 : 1;  // wider outputs of two tiles do not fit the registers
  p.chunk_shift = p.row_tiles == 2 ? 4 : 3;
  p.step_shift = p.cache == DecodeCache::kLikeQ ? 4 : 5;
  p.per_group = reciprocal(p.group);
  p.whole_below = -1;
  p.whole_workers = 1;
  p.lanes = 1;
  p.even = false;
  p.ctas = 1;
  p.stream = false;
  p.segment_cost = 8;
  p.cluster_shift = attention::kMaxClusterShift;
  if (p.invariant) {
    p.cut_shift = p.cluster_shift;
    p.clusters = p.workers = std::max(gpu.clusters[p.cluster_shift], 1);
  } else {
    share_out(p, gpu, std::max(p.batch, 1) * p.kv_heads * (((rows - 1) >> p.chunk_shift) + 1));
  }
  finish_plan(p);
}

}  // namespace pyllm
