// layer_norm: y = (h - mean) * rsqrt(var + eps) * weight + bias, all in fp32, h as in norm_row.cuh (x, or round(x + residual)).
// var = mean((h - mean)^2), a second pass over the registers: E[h^2] - mean^2 would cancel where |mean| >> std.
// Layout and limits: norm_row.cuh. Two reductions, one barrier each.
#pragma once
#include "norm/norm_row.cuh"

namespace pyllm::norm {

template <class C>
struct LayerFormula {
  static constexpr bool kBias = true;
  float mean;
  float rstd;

  __device__ __forceinline__ LayerFormula(const Row<C>& row, float inv_n, float eps) {
    float even = 0.f, odd = 0.f;  // two chains: half the latency of the sum
#pragma unroll
    for (int j = 0; j < C::kVectors; ++j) {
      float f[C::kV];
      row.values(j, f);
#pragma unroll
      for (int i = 0; i < C::kV; i += 2) even += f[i], odd += f[i + 1];
    }
    mean = row.threads.reduce(even + odd, SumOp{}) * inv_n;
    even = odd = 0.f;
#pragma unroll
    for (int j = 0; j < C::kVectors; ++j) {
      if (!row.has(j)) continue;  // past the row h is 0, not mean
      float f[C::kV];
      row.values(j, f);
#pragma unroll
      for (int i = 0; i < C::kV; i += 2) {
        even = fmaf(f[i] - mean, f[i] - mean, even);
        odd = fmaf(f[i + 1] - mean, f[i + 1] - mean, odd);
      }
    }
    rstd = rsqrtf(row.threads.reduce(even + odd, SumOp{}) * inv_n + eps);
  }
  __device__ __forceinline__ float operator()(float h, float w, float b) const { return fmaf((h - mean) * rstd, w, b); }
};

}  // namespace pyllm::norm
