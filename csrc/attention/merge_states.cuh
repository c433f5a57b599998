// merge_states: attention over two disjoint sets of keys from attention over each: o = (e^a o_a + e^b o_b) / (e^a + e^b), a and b their
// LSE; the LSE of both is log(e^a + e^b). In fp32, o rounded once. A side without keys (-inf) does not count, whatever its o holds.
//
// A thread owns 16 bytes of a row, CTAs whole rows; 3 T H D elements and 12 T H bytes of LSE move through memory.
// Limits: rows of a multiple of 16 bytes, up to 8 KiB; T H below 2^31.
#pragma once
#include "attention/merge_states.h"
#include "common/launch.h"
#include "common/vec.cuh"

namespace pyllm::attention {

constexpr int kMergeThreads = 512;

template <class T>
__global__ void __launch_bounds__(kMergeThreads) merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
  constexpr int kWidth = 16 / sizeof(T);
  const int vectors = p.dim / kWidth, rows = kMergeThreads / vectors;  // of a row, of a CTA
  const int within = static_cast<int>(threadIdx.x) / vectors, vector = static_cast<int>(threadIdx.x) - within * vectors;
  const uint32_t row = blockIdx.x * rows + within, token = row / static_cast<uint32_t>(p.heads), head = row - token * p.heads;
  pdl_wait();
  if (within >= rows || token >= p.tokens) return;
  Vec<T, kWidth> o[2];
  float lse[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    o[side] =
        load_vec<T, kWidth>(static_cast<const T*>(p.o[side]) + token * p.token_stride[side] + head * p.head_stride[side] + vector * kWidth);
    lse[side] = p.lse[side][row];
  }
  pdl_trigger();
  const float top = fmaxf(lse[0], lse[1]);
  float weight[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) weight[side] = lse[side] == -INFINITY ? 0.f : expf(lse[side] - top);
  const float sum = weight[0] + weight[1], factor = sum == 0.f ? 0.f : 1.f / sum;
  Vec<T, kWidth> y;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const float a = weight[0] == 0.f ? 0.f : weight[0] * to_float(o[0][i]), b = weight[1] == 0.f ? 0.f : weight[1] * to_float(o[1][i]);
    y[i] = from_float<T>((a + b) * factor);
  }
  store_vec(static_cast<T*>(p.out) + static_cast<int64_t>(row) * p.dim + vector * kWidth, y);
  if (vector == 0) p.out_lse[row] = sum == 0.f ? -INFINITY : top + logf(sum);
}

}  // namespace pyllm::attention
