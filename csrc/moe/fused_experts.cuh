// The last step of the routed MLPs: out[t] = sum_j weights[t, j] x[positions[t, j]], x the experts' outputs in sorted order.
//
// In the order of j, fp32 inside, rounded once. A pair without a row (its expert does not exist) makes the token NaN. A thread has 8
// columns of a token; four rows are on their way at a time.
#pragma once
#include <cmath>

#include "common/launch.h"
#include "common/vec.cuh"
#include "moe/fused_experts.h"

namespace pyllm::moe {

constexpr int kCombineThreads = 128, kInFlight = 4;

struct CombineArgs {
  const void* x;         // [pairs, n] sorted rows
  const int* positions;  // [tokens, top_k]
  const float* weights;  // [tokens, top_k]
  void* out;             // [tokens, n]
  int64_t n;
  int top_k;
};

template <class T>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ CombineArgs p) {
  const int64_t token = blockIdx.x;
  const int column = (blockIdx.y * kCombineThreads + threadIdx.x) * 8;
  pdl_wait();
  pdl_trigger();
  if (column >= p.n) return;
  float sum[8] = {};
  for (int j = 0; j < p.top_k; j += kInFlight) {
    int4 bits[kInFlight];
    float weight[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      weight[i] = 0.f;
      bits[i] = {};
      if (j + i >= p.top_k) continue;
      const int row = __ldcg(p.positions + token * p.top_k + j + i);
      weight[i] = row < 0 ? NAN : __ldcg(p.weights + token * p.top_k + j + i);
      if (row >= 0) bits[i] = __ldcg(reinterpret_cast<const int4*>(static_cast<const T*>(p.x) + row * p.n + column));
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (j + i >= p.top_k) continue;
      const auto& x = reinterpret_cast<const Vec<T, 8>&>(bits[i]);
#pragma unroll
      for (int c = 0; c < 8; ++c) sum[c] = fmaf(weight[i], to_float(x[c]), sum[c]);
    }
  }
  Vec<T, 8> y;
#pragma unroll
  for (int c = 0; c < 8; ++c) y[c] = from_float<T>(sum[c]);
  store_vec(static_cast<T*>(p.out) + token * p.n + column, y);
}

}  // namespace pyllm::moe
