// softcap: out[t, i] = round(cap * tanh(x[t, i] / cap)) in fp32.
//
// bf16 takes the hardware tanh (relative error 2^-11, an eighth of the output rounding); fp16 and fp32 take tanhf.
// Layout: x [T, V] dense rows, any stride of a multiple of 16 bytes; out [T, V] contiguous. The kernel is map_kernel.
// Limits: V a multiple of 8, 0 < cap < inf.
#pragma once
#include "fused/activations.cuh"
#include "fused/elementwise.cuh"
#include "fused/softcap.h"

namespace pyllm::fused {

template <bool Fast>
struct Softcap {
  float cap, inverse;
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (Fast) return cap * fast_tanh(x * inverse);
    return cap * tanhf(x * inverse);
  }
};

template <class T>
void launch_softcap(const SoftcapParams& p, cudaStream_t stream) {
  const int64_t row_bytes = p.x_stride * static_cast<int64_t>(sizeof(T));
  const MapArgs a{static_cast<const char*>(p.x), static_cast<char*>(p.out), row_bytes,
                  flat_plan(p.tokens, p.width / kWidth<T>, p.x_stride == p.width)};
  launch_map<T, PYLLM_ACT_VECTORS>("softcap", a, Softcap<std::is_same_v<T, __nv_bfloat16>>{p.cap, 1.f / p.cap}, stream);
}

}  // namespace pyllm::fused
