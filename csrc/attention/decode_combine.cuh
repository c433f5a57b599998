// Joins the pieces of the segments that decode cut: o = sum of 2^(m_i - m) o_i / sum of 2^(m_i - m) l_i, in a fixed order.
//
// grid (workers - 1, rows; at least one): CTA (i, row) looks at the border between workers i and i + 1. The first border inside a segment
// joins it; any other CTA has no such work. The threads of a CTA share the pieces, D / 4 threads to each, and meet in shared memory.
#pragma once
#include "attention/decode_work.cuh"
#include "attention/mma.cuh"
#include "common/launch.h"
#include "common/vec.cuh"

namespace pyllm::attention {

constexpr int kCombineWarps = 8;
constexpr int kFlight = 8;  // pieces that a thread loads at once: two rounds cover 128 pieces at D = 128

// The pieces of a segment: of worker `first` the one it did not end, of the `count` - 1 workers behind it those they did not begin.
struct Pieces {
  int first, count;
  __device__ __forceinline__ int64_t at(int i) const { return 2 * static_cast<int64_t>(first + i) + (i == 0 ? 1 : 0); }
};

// Rows without keys, and rows of q that belong to no sequence: 0, and the LSE of nothing but the sink. Shared out over all CTAs.
template <class Q>
__device__ __forceinline__ void write_empty_rows(const DecodeAttentionParams& p) {
  const auto write = [&p](int64_t token, bool belongs) {
    uint4* const to = reinterpret_cast<uint4*>(static_cast<Q*>(p.out) + token * p.heads * p.dim);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.heads * p.dim / 8; i += kCombineWarps * 32) to[i] = uint4{0, 0, 0, 0};
#pragma unroll 1
    for (int h = threadIdx.x; h < p.heads; h += kCombineWarps * 32) {
      p.lse[token * p.heads + h] = belongs && p.sinks != nullptr ? p.sinks[h] : -INFINITY;
    }
  };
  const int first = blockIdx.y * gridDim.x + blockIdx.x, step = gridDim.x * gridDim.y;
#pragma unroll 1
  for (int b = first; b < p.batch; b += step) {
    const Sequence s = sequence_at(p, b);
#pragma unroll 1
    for (int i = 0; s.tiles == 0 && i < s.rows; ++i) write(s.q_start + i, true);
  }
#pragma unroll 1
  for (int64_t token = static_cast<int64_t>(p.q_starts[p.batch]) + first; token < p.tokens; token += step) write(token, false);
}

// Joins the pieces of row blockIdx.y of a chunk: the row of `token` and `head`.
template <class Q, int Dim>
__device__ __forceinline__ void join(const DecodeAttentionParams& p, Pieces pieces, int token, int head) {
  constexpr int kLanes = Dim / 4, kGroups = kCombineWarps * 32 / kLanes;
  __shared__ float4 outs[kGroups][kLanes];
  __shared__ float2 sums[kGroups];
  const int rows = p.row_tiles * kRowTile, group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float top = -INFINITY, sum = 0.f;
  float4 o{0.f, 0.f, 0.f, 0.f};
  for (int from = group; from < pieces.count; from += kGroups * kFlight) {
    float2 m[kFlight];
    float4 x[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const int piece = from + i * kGroups;
      m[i] = make_float2(-INFINITY, 0.f);
      x[i] = {0.f, 0.f, 0.f, 0.f};
      if (piece >= pieces.count) continue;
      const int64_t line = pieces.at(piece) * rows + blockIdx.y;
      m[i] = reinterpret_cast<const float2*>(p.partial_sums)[line];
      x[i] = reinterpret_cast<const float4*>(p.partial + line * Dim)[lane];
    }
    float now = top;
#pragma unroll
    for (int i = 0; i < kFlight; ++i) now = fmaxf(now, m[i].x);
    if (now == -INFINITY) continue;
    const float keep = exp2_fast(top - now);
    sum *= keep, o.x *= keep, o.y *= keep, o.z *= keep, o.w *= keep;
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      const float weight = exp2_fast(m[i].x - now);
      sum = fmaf(m[i].y, weight, sum);
      o.x = fmaf(x[i].x, weight, o.x), o.y = fmaf(x[i].y, weight, o.y), o.z = fmaf(x[i].z, weight, o.z), o.w = fmaf(x[i].w, weight, o.w);
    }
    top = now;
  }
  outs[group][lane] = o;
  if (lane == 0) sums[group] = make_float2(top, sum);
  __syncthreads();
  if (group != 0) return;
#pragma unroll
  for (int g = 1; g < kGroups; ++g) top = fmaxf(top, sums[g].x);
  o = {0.f, 0.f, 0.f, 0.f};
  sum = 0.f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const float weight = sums[g].x == -INFINITY ? 0.f : exp2_fast(sums[g].x - top);
    const float4 x = outs[g][lane];
    sum = fmaf(sums[g].y, weight, sum);
    o.x = fmaf(x.x, weight, o.x), o.y = fmaf(x.y, weight, o.y), o.z = fmaf(x.z, weight, o.z), o.w = fmaf(x.w, weight, o.w);
  }
  const RowEnd end = finish_row(top, sum, p.sinks == nullptr ? nullptr : p.sinks + head);
  const float factor = end.factor * (p.v_scale != nullptr ? p.v_scale[head / p.group * p.v_scale_step] : 1.f);
  const int64_t to = static_cast<int64_t>(token) * p.heads + head;
  Vec<Q, 4> y;
  y[0] = from_float<Q>(o.x * factor), y[1] = from_float<Q>(o.y * factor), y[2] = from_float<Q>(o.z * factor),
  y[3] = from_float<Q>(o.w * factor);
  store_vec(static_cast<Q*>(p.out) + to * Dim + lane * 4, y);
  if (lane == 0) p.lse[to] = end.lse;
}

template <class Q, int Dim>
__global__ void __launch_bounds__(kCombineWarps * 32) decode_combine_kernel(const __grid_constant__ DecodeAttentionParams p) {
  __shared__ LocateScratch<kCombineWarps> scratch;
  // kv_lens and q_starts: each CTA of decode had passed its own wait when this grid could start, so they are there already.
  const Place place = locate(p, scratch, [&](int total) { return Shares(p, total).begin(blockIdx.x + 1); });
  const Shares shares(p, place.total);
  const int left = blockIdx.x;
  bool joins = left + 1 < shares.workers;
  Pieces pieces{};
  int token = 0, head = 0;
  if (joins) {
    const int border = shares.begin(left + 1);
    const Sequence s = sequence_at(p, place.b);
    const int unit = (border - place.before) / s.tiles, segment = place.before + unit * s.tiles;
    const QueryRow row = query_row(p, unit, s.rows, blockIdx.y);
    joins = border > segment && shares.begin(left) <= segment && row.exists;
    token = s.q_start + row.j;
    head = row.head;
    if (joins) pieces = {left, shares.owner(segment + s.tiles - 1) - left + 1};
  }
  pdl_wait();
  pdl_trigger();
  if (joins) join<Q, Dim>(p, pieces, token, head);
  write_empty_rows<Q>(p);
}

}  // namespace pyllm::attention
