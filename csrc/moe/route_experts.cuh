// Top-k experts of each token and their weights: a warp for a token, its scores in registers (lane l has experts l, l + 32, ...).
//
// The top_k largest are taken one by one: a warp-wide maximum (redux) of keys in the order of the scores, then the lowest expert among
// equals. Lane j keeps choice j. softmax: over all experts; topk_softmax: over the chosen logits; sigmoid: per expert.
#pragma once
#include <cmath>

#include "common/launch.h"
#include "common/vec.cuh"
#include "moe/route_experts.h"

namespace pyllm::moe {

constexpr int kRouteWarps = 4;

// Grows with x; NaNs of positive sign are above infinity, as torch.sort has them. -0 is 0 here.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(isnan(x) ? NAN : x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// Logits -> scores.
template <int V>
__device__ __forceinline__ void score(float (&x)[V], const RouteParams& p, int lane) {
  if (p.scoring == Scoring::kSigmoid) {
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] = 1.f / (1.f + expf(-x[v]));
  } else if (p.scoring == Scoring::kSoftmax) {
    float most = -INFINITY, sum = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) most = fmaxf(most, x[v]);
    most = warp_max(most);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[v] = lane + 32 * v < p.experts ? expf(x[v] - most) : 0.f;
      sum += x[v];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int v = 0; v < V; ++v) x[v] /= sum;
  }
}

// A bit for each of the best groups: of lane g's the value is its best choice or, with a bias, the sum of its two best.
__device__ __forceinline__ uint32_t best_groups(const float* choice, const RouteParams& p, int lane) {
  const int size = p.experts / p.groups;
  float first = -INFINITY, second = -INFINITY;
  if (lane < p.groups) {
    for (int i = 0; i < size; ++i) {
      const float x = choice[lane * size + i];
      second = fmaxf(second, fminf(first, x));
      first = fmaxf(first, x);
    }
  }
  uint32_t key = lane < p.groups ? ordered(p.bias == nullptr ? first : first + second) : 0, best = 0;
  for (int j = 0; j < p.top_groups; ++j) {
    const uint32_t most = __reduce_max_sync(~0u, key);
    const int chosen = __ffs(__ballot_sync(~0u, key == most)) - 1;
    best |= 1u << chosen;
    if (lane == chosen) key = 0;
  }
  return best;
}

template <class T, int V>
__global__ void __launch_bounds__(32 * kRouteWarps) route_kernel(const __grid_constant__ RouteParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRouteWarps + threadIdx.x / 32;
  float bias[V];
#pragma unroll
  for (int v = 0; v < V; ++v) bias[v] = p.bias != nullptr && lane + 32 * v < p.experts ? p.bias[lane + 32 * v] : 0.f;
  pdl_wait();
  pdl_trigger();
  if (token >= p.tokens) return;
  float x[V];
  uint32_t key[V];
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int e = lane + 32 * v;
    x[v] = e < p.experts ? to_float(static_cast<const T*>(p.logits)[token * p.stride + e]) : -INFINITY;
  }
  score<V>(x, p, lane);
#pragma unroll
  for (int v = 0; v < V; ++v) key[v] = lane + 32 * v < p.experts ? ordered(x[v] + bias[v]) : 0;  // 0: below every number
  if (p.groups > 1) {
    __shared__ float choices[kRouteWarps][32 * V];
    float* choice = choices[threadIdx.x / 32];
#pragma unroll
    for (int v = 0; v < V; ++v) choice[lane + 32 * v] = x[v] + bias[v];
    __syncwarp();
    const uint32_t best = best_groups(choice, p, lane);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!(best >> (lane + 32 * v) / (p.experts / p.groups) % 32 & 1)) key[v] = 0;
    }
  }
  float weight = 0.f;
  int id = 0;
  for (int j = 0; j < p.top_k; ++j) {
    uint32_t best = 0;
    int at = lane;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (key[v] > best) best = key[v], at = lane + 32 * v;
    }
    const uint32_t most = __reduce_max_sync(~0u, best);
    const int chosen = __reduce_min_sync(~0u, best == most ? at : kMaxRouted);
    float value = 0.f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (lane + 32 * v == chosen) value = x[v], key[v] = 0;
    }
    value = __shfl_sync(~0u, value, chosen % 32);
    if (lane == j) weight = value, id = chosen;
  }
  const bool mine = lane < p.top_k;
  if (p.scoring == Scoring::kTopkSoftmax) {
    const float most = warp_max(mine ? weight : -INFINITY), e = mine ? expf(weight - most) : 0.f;
    weight = e / warp_sum(e);
  } else if (p.renormalize) {
    weight /= fmaxf(warp_sum(mine ? weight : 0.f), 1e-20f);
  }
  if (mine) {
    p.weights[token * p.top_k + lane] = weight * p.scale;
    p.ids[token * p.top_k + lane] = id;
  }
}

}  // namespace pyllm::moe
