// silu(x) = x / (1 + exp(-x)), gelu(x) = x Phi(x), gelu_tanh(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), relu2(x) = max(x, 0)^2,
// and tanh for the soft cap; all on fp32.
//
// Two accuracies. Exact = false, for results rounded to bf16 or fp16 (u = 2^-8, 2^-11): hardware exp2 and reciprocal (2^-22, 2^-23)
// and an exponent of at most 87 that carries a few roundings of 2^-24 each: below 2^-14 of the result. Exact = true, for fp32: the
// CUDA library functions (a few ulp).
// Limits: f(-inf) = +-0, f(+inf) = +inf, NaN stays NaN. Below x = -87 the hardware reciprocal flushes: results below 2^-119 may be 0.
#pragma once
#include <cfloat>

namespace pyllm::fused {

enum Activation : int { kSilu, kGelu, kGeluTanh, kRelu2, kActivations };

constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x as a factor: finite at -inf, so that f(-inf) is -FLT_MAX * 0 and not -inf * 0. A NaN becomes -FLT_MAX here and comes back through
// the other factor.
__device__ __forceinline__ float left_finite(float x) { return fmaxf(x, -FLT_MAX); }

// x * sigmoid(y), y a positive multiple of x.
template <bool Exact>
__device__ __forceinline__ float times_sigmoid(float x, float y) {
  if constexpr (Exact) return left_finite(x) / (1.f + expf(-y));
  return left_finite(x) * fast_reciprocal(1.f + fast_exp2(-kLog2E * y));
}

// x * Phi(x). Phi(-z) = exp(-z^2 / 2) * t * q(t), t = 1 / (1 + 0.31 z), q a minimax polynomial (relative error 2^-17.7 for z <= 14, where
// exp(-z^2 / 2) is already below 2^-141). The negative tail keeps its relative accuracy, which (1 + erf) / 2 would cancel away.
template <bool Exact>
__device__ __forceinline__ float gelu(float x) {
  if constexpr (Exact) return left_finite(x) * (0.5f * erfcf(x * -0.70710678f));
  const float t = fast_reciprocal(fmaf(0.31f, fabsf(x), 1.f));
  float q = fmaf(-0.0739292279f, t, 0.180450588f);
  q = fmaf(q, t, 0.0157444477f);
  q = fmaf(q, t, 0.133429915f);
  q = fmaf(q, t, 0.12044125f);
  q = fmaf(q, t, 0.123860702f);
  const float tail = q * t * fast_exp2(-0.5f * kLog2E * x * x);
  // x Phi(x) = max(x, 0) - |x| Phi(-|x|): no comparison, and one rounding for x > 0. A NaN comes through the tail.
  return fmaf(-fminf(fabsf(x), FLT_MAX), tail, fmaxf(x, 0.f));
}

template <int Kind, bool Exact>
struct Act {
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (Kind == kSilu) return times_sigmoid<Exact>(x, x);
    if constexpr (Kind == kGelu) return gelu<Exact>(x);
    if constexpr (Kind == kGeluTanh) return times_sigmoid<Exact>(x, x * fmaf(0.0713548162f * x, x, 1.59576912f));
    if constexpr (Kind == kRelu2) return x < 0.f ? 0.f : x * x;  // the comparison lets NaN through, fmaxf would not
  }
};

}  // namespace pyllm::fused
