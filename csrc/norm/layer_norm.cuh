// layer_norm: y = (h - mean) * rsqrt(var + eps) * weight + bias, all in fp32, h as in norm_row.cuh (x, or round(x + residual)).
// var = mean((h - mean)^2), a second pass over the registers: E[h^2] - mean^2 would cancel where |mean| >> std.
// Layout and limits: norm_row.cuh. Two reductions, one barrier each; a third where every row has its scale.
// Best measured: H200, T=8192 N=4096 bf16, share of a copy of the same bytes: 95.1 %, with residual 96.6 %.
#pragma once
#include "norm/norm_row.cuh"

namespace pyllm::norm {

template <class C>
struct LayerFormula {
  static constexpr bool kBias = true;
  float mean;
  float rstd;
  float absmax = 0.f;  // of y; with a scale per row alone

  __device__ __forceinline__ LayerFormula(const Row<C>& row, float inv_n, float eps) {
    const float sum = total(row, [](bool, float even, float odd, const float* f) { return float2{even + f[0], odd + f[1]}; });
    mean = __fmul_rn(sum, inv_n);  // never fused with the subtractions below: every layout must have the same bits
    const float m = mean;
    const float squares = total(row, [m](bool in, float even, float odd, const float* f) {
      const float c = in ? m : 0.f;  // past the row h is 0, not mean
      return float2{fmaf(f[0] - c, f[0] - c, even), fmaf(f[1] - c, f[1] - c, odd)};
    });
    rstd = rsqrtf(fmaf(squares, inv_n, eps));
    if constexpr (C::kQuant == NormQuant::kToken) {
#pragma unroll
      for (int j = 0; j < C::kVectors; ++j) {
        if (!row.has(j)) continue;
        float y[C::kV];
        result(row, j, y);
#pragma unroll
        for (int i = 0; i < C::kV; ++i) absmax = fmaxf(absmax, fabsf(y[i]));
      }
      absmax = row.threads.reduce(absmax, MaxOp{});
    }
  }

  // The values of vector j.
  __device__ __forceinline__ void result(const Row<C>& row, int j, float* y) const {
    float w[C::kV], b[C::kV] = {};
    row.values_again(j, y);
    row.weights(j, w);
    if (!C::kOneByOne || row.bias.base != nullptr) row.biases(j, b);
#pragma unroll
    for (int i = 0; i < C::kV; ++i) y[i] = fmaf((y[i] - mean) * rstd, w[i], b[i]);
  }

 private:
  // Sum over the row, two elements at a time: `add` takes whether they are in the row and the two running
  // sums (two chains: half the latency), and returns the next.
  template <class Add>
  static __device__ __forceinline__ float total(const Row<C>& row, Add add) {
    float sums[C::kFold];
#pragma unroll
    for (int k = 0; k < C::kFold; ++k) {
      float2 chains = {0.f, 0.f};
#pragma unroll
      for (int j = k * C::kUnit; j < (k + 1) * C::kUnit; ++j) {
        float f[C::kV];
        row.values(j, f);
#pragma unroll
        for (int i = 0; i < C::kV; i += 2) chains = add(row.has(j), chains.x, chains.y, f + i);
      }
      sums[k] = chains.x + chains.y;
    }
    return row.threads.sum(sums);
  }
};

}  // namespace pyllm::norm
