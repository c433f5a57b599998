// q of a step over an e4m3 cache: q_fp8 = e4m3(q / scale), scale = max(max|q| / 448, 1e-10) of each (token, head) row of D values.
// D / 8 lanes hold a row, 16 bytes each; a warp takes 32 / (D / 8) rows. Moves 3 bytes a value.
#pragma once
#include "attention/paged_attention.h"
#include "common/fp8.cuh"
#include "common/launch.h"
#include "common/vec.cuh"

namespace pyllm::attention {

constexpr int kQuantThreads = 256;

template <class T, int D>
__global__ void __launch_bounds__(kQuantThreads) quantize_rows_kernel(const __grid_constant__ PagedAttentionParams p) {
  constexpr int kLanes = D / 8;
  const int64_t rows = p.prefill.tokens * p.prefill.heads;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kQuantThreads + threadIdx.x) / kLanes;
  const int at = threadIdx.x % kLanes * 8;
  pdl_wait();
  pdl_trigger();
  const int64_t mine = row < rows ? row : rows - 1;  // lanes past the end repeat the last row, for the shuffles
  const int64_t token = mine / p.prefill.heads, head = mine - token * p.prefill.heads;
  const auto x = load_vec<T, 8>(static_cast<const T*>(p.q) + token * p.q_token_stride + head * p.q_head_stride + at);
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(to_float(x[i])));
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, offset));
  const float scale = fmaxf(most / kE4M3Max, kMinScale), inverse = 1.f / scale;
  uint2 packed;
  auto* pairs = reinterpret_cast<uint16_t*>(&packed);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = to_e4m3x2(to_float(x[2 * i]) * inverse, to_float(x[2 * i + 1]) * inverse);
  if (row >= rows) return;
  *reinterpret_cast<uint2*>(p.q_fp8 + row * D + at) = packed;
  if (at == 0) p.q_scale[row] = scale;
}

}  // namespace pyllm::attention
