// act_mul: out[t, i] = round(f(x[t, i]) * x[t, F + i]), f one of silu, gelu, gelu_tanh, relu2 in fp32, one rounding.
//
// Layout: x [T, 2F] dense rows, gate then up, any stride of a multiple of 16 bytes; out [T, F] contiguous. A thread owns Vectors
// 16-byte vectors of out: 2 * Vectors loads are in flight before the first store. 3 * T * F elements move through memory.
// Limits: F a multiple of 8.
#pragma once
#include "fused/act_mul.h"
#include "fused/activations.cuh"
#include "fused/elementwise.cuh"

namespace pyllm::fused {

struct ActMulArgs {
  const char* x;       // rows of T, row_bytes apart
  char* out;           // contiguous
  int64_t row_bytes;   // multiple of 16
  int64_t half_bytes;  // from gate to up: F elements
  FlatPlan plan;       // of out
};

template <class T, int Threads, int Vectors, class F>
__global__ void __launch_bounds__(Threads) act_mul_kernel(ActMulArgs a) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (Threads * Vectors) + threadIdx.x;
  const char* from[Vectors];
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    const RowCol at = split_index(a.plan.split, first + k * Threads);
    from[k] = a.x + at.row * a.row_bytes + at.col * 16;
  }
  uint4 gate[Vectors], up[Vectors];
  pdl_wait();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    if (first + k * Threads < a.plan.total) {
      gate[k] = load_once(from[k]);
      up[k] = load_once(from[k] + a.half_bytes);
    }
  }
  pdl_trigger();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    const int64_t i = first + k * Threads;
    if (i >= a.plan.total) break;
    float g[kWidth<T>], u[kWidth<T>];
    unpack<T>(gate[k], g);
    unpack<T>(up[k], u);
#pragma unroll
    for (int j = 0; j < kWidth<T>; ++j) g[j] = F{}(g[j]) * u[j];
    store_out(a.out + i * 16, pack<T>(g));
  }
}

template <class T, int Kind>
void launch_act_mul(const ActMulParams& p, cudaStream_t stream) {
  using F = Act<Kind, sizeof(T) == 4>;
  constexpr int kVectors = PYLLM_ACT_MUL_VECTORS;
  constexpr int64_t kItem = sizeof(T);
  const ActMulArgs a{static_cast<const char*>(p.x), static_cast<char*>(p.out), p.x_stride * kItem, p.width * kItem,
                     flat_plan(p.tokens, p.width / kWidth<T>, false)};
  if (a.plan.total == 0) return;
  if (is_large(a.plan.total)) {
    launch("act_mul", {ctas(a.plan.total, kThreads * kVectors), kThreads}, stream, act_mul_kernel<T, kThreads, kVectors, F>, a);
  } else {
    launch("act_mul", {ctas(a.plan.total, kSmallThreads), kSmallThreads}, stream, act_mul_kernel<T, kSmallThreads, 1, F>, a);
  }
}

}  // namespace pyllm::fused
