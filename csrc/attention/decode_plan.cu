// How decode_attention is launched, from its shapes alone: a replayed graph meets other lengths.
#include <algorithm>
#include <atomic>
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

// Up to so many numbers a segment, if all SMs had work, segments are not cut between workers. One sequence, 8 KV heads, so 64 of 132 SMs:
// uncut 11.5 against 13.0 us at 4k keys, 29.0 against 24.2 us at 16k (H200).
constexpr int kWholeCost = 900;

uint32_t reciprocal(int x) { return x == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + x - 1) / x); }

// The rest of the plan from workers and cluster_shift. units: the segments of sequences of usual_q rows.
void finish_plan(DecodeAttentionParams& p, const Gpu& gpu, int units) {
  p.share = reciprocal(p.workers);
  const bool whole = !p.invariant && p.cluster_shift > 0 && units < p.workers;
  p.whole_below = whole ? units * (kWholeCost * (units << p.cluster_shift) / gpu.sms) : -1;
  p.whole_workers = whole ? units : 1;
  p.whole_share = reciprocal(p.whole_workers);
  p.per_group = reciprocal(p.group);
  p.workspace_bytes = static_cast<int64_t>(p.workers) * p.row_tiles * (2 * p.dim / 16 * 32 + (attention::kRowTile << p.cluster_shift)) * 16;
  p.stamp = next_stamp();
}

}  // namespace

void plan_decode_attention(DecodeAttentionParams& p) {
  static const Gpu gpu = find_gpu();
  const int rows = p.group * p.usual_q;
  p.row_tiles = rows > attention::kRowTile && p.dim <= attention::kNarrow ? 2 : 1;  // wider outputs of two tiles do not fit the registers
  p.chunk_shift = p.row_tiles == 2 ? 4 : 3;
  const int units = p.batch * p.kv_heads * (((rows - 1) >> p.chunk_shift) + 1);
  p.cluster_shift = attention::kMaxClusterShift;
  if (!p.invariant) {
    // The largest clusters of which there is one for each segment: equal segments are not cut then.
    while (p.cluster_shift > 0 && gpu.clusters[p.cluster_shift] < units) --p.cluster_shift;
  }
  p.ctas = 1;
  p.workers = p.cluster_shift > 0 ? std::max(gpu.clusters[p.cluster_shift], 1) : gpu.sms * p.ctas;
  if (!p.invariant && units <= p.workers && (units << p.cluster_shift) * 10 >= gpu.sms * p.ctas * 9) p.workers = units;
  p.step_shift = p.cache == DecodeCache::kLikeQ ? 4 : 5;
  const int64_t keys = static_cast<int64_t>(p.width) << p.page_shift, steps = ((keys - 1) >> p.step_shift) + 1;
  p.workers = static_cast<int>(std::clamp<int64_t>((steps * units + 3) / 4, 1, p.workers));
  finish_plan(p, gpu, units);
}

}  // namespace pyllm
