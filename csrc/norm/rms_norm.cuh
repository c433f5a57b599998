// rms_norm: y = h * rsqrt(mean(h^2) + eps) * weight, all in fp32, h as in norm_row.cuh (x, or round(x + residual)).
// Layout and limits: norm_row.cuh. One reduction, one barrier per row.
#pragma once
#include "norm/norm_row.cuh"

namespace pyllm::norm {

template <class C>
struct RmsFormula {
  static constexpr bool kBias = false;
  float rstd;

  __device__ __forceinline__ RmsFormula(const Row<C>& row, float inv_n, float eps) {
    float even = 0.f, odd = 0.f;  // two chains: half the latency of the sum
#pragma unroll
    for (int j = 0; j < C::kVectors; ++j) {
      float f[C::kV];
      row.values(j, f);
#pragma unroll
      for (int i = 0; i < C::kV; i += 2) {
        even = fmaf(f[i], f[i], even);
        odd = fmaf(f[i + 1], f[i + 1], odd);
      }
    }
    const float sum = row.threads.reduce(even + odd, SumOp{});
    rstd = rsqrtf(sum * inv_n + eps);
  }
  __device__ __forceinline__ float operator()(float h, float w, float) const { return h * rstd * w; }
};

}  // namespace pyllm::norm
