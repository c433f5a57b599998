// act: out[t, i] = round(f(x[t, i])), f one of silu, gelu, gelu_tanh, relu2 in fp32.
//
// Layout: x [T, F] dense rows, any stride of a multiple of 16 bytes; out [T, F] contiguous. The kernel is map_kernel.
// Best measured: H200, silu, T = 8192, bf16: 99 to 100 % of a copy of the same bytes.
// Limits: F a multiple of 8.
#pragma once
#include "fused/act.h"
#include "fused/activations.cuh"
#include "fused/elementwise.cuh"

namespace pyllm::fused {

template <class T, int Kind>
void launch_act(const ActParams& p, cudaStream_t stream) {
  launch_map<T>("act", p.x, p.out, p.tokens, p.width, p.x_stride * static_cast<int64_t>(sizeof(T)), Act<Kind, sizeof(T) == 4>{}, stream);
}

}  // namespace pyllm::fused
