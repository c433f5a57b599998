// e4m3 conversion: values are clamped to +-448 first (the format has no infinity), NaN stays NaN; round to nearest even.
#pragma once
#include <cuda_fp8.h>

#include <cstdint>

namespace pyllm {

constexpr float kE4M3Max = 448.f;
// Smallest dynamic scale: an all-zero row still gets a finite reciprocal (1 / 1e-10 < FLT_MAX).
constexpr float kMinScale = 1e-10f;

// `cvt.satfinite` maps |x| > 448 and infinities to +-448 and keeps NaN: no separate clamp is needed.
__device__ __forceinline__ uint16_t to_e4m3x2(float lo, float hi) {
  return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E4M3);
}
__device__ __forceinline__ uint8_t to_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

}  // namespace pyllm
