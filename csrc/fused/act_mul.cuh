// act_mul: out[t, i] = round(f(x[t, i]) * x[t, F + i]), f one of silu, gelu, gelu_tanh, relu2 in fp32, one rounding.
//
// Layout: x [T, 2F] dense rows, gate then up, any stride of a multiple of 16 bytes; out [T, F] contiguous. A thread owns one
// 16-byte vector of out, so two loads are in flight; two vectors gain nothing. 3 * T * F elements move through memory.
// Measured: H200, silu, 8192 x 4096, bf16: 102 % of a copy of the same bytes.
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
  uint32_t total;      // vectors of out
  RowSplit split;      // of them
};

template <class T, int Threads, class F>
__global__ void __launch_bounds__(Threads) act_mul_kernel(const __grid_constant__ ActMulArgs a) {
  const uint32_t i = blockIdx.x * Threads + threadIdx.x;
  const char* const from = vector_at(a.x, a.row_bytes, split_index(a.split, i));
  pdl_wait();
  if (i >= a.total) return;
  const uint4 gate = load_vector(from), up = load_vector(from + a.half_bytes);
  pdl_trigger();
  float g[kWidth<T>], u[kWidth<T>];
  unpack<T>(gate, g);
  unpack<T>(up, u);
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j) g[j] = F{}(g[j]) * u[j];
  store_vector(a.out + static_cast<int64_t>(i) * 16, pack<T>(g));
}

template <class T, int Kind>
void launch_act_mul(const ActMulParams& p, cudaStream_t stream) {
  using F = Act<Kind, sizeof(T) == 4>;
  constexpr int64_t kItem = sizeof(T);
  const int64_t vectors = p.width / kWidth<T>, row_bytes = p.x_stride * kItem, out_bytes = p.width * kItem;
  in_launches("act_mul", p.tokens, vectors, [&](int64_t first, int64_t count) {
    const ActMulArgs a{static_cast<const char*>(p.x) + first * row_bytes,
                       static_cast<char*>(p.out) + first * out_bytes,
                       row_bytes,
                       out_bytes,
                       static_cast<uint32_t>(count * vectors),
                       row_split(vectors)};
    if (is_large(a.total)) {
      launch("act_mul", {ctas(a.total, kThreads), kThreads}, stream, act_mul_kernel<T, kThreads, F>, a);
    } else {
      launch("act_mul", {ctas(a.total, kSmallThreads), kSmallThreads}, stream, act_mul_kernel<T, kSmallThreads, F>, a);
    }
  });
}

}  // namespace pyllm::fused
