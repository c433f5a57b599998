// softcap: out[t, i] = round(cap * tanh(x[t, i] / cap)) in fp32, any number of columns, rows at any element.
//
// bf16 takes the hardware tanh (relative error 2^-11, an eighth of the output rounding). fp16 and fp32: tanh(y) = 1 - 2 / (1 + exp(2 |y|))
// with hardware exp2 and reciprocal, and below 0.6, where that cancels, y + y^3 p(y^2) with a minimax polynomial p (relative error
// 2^-23.5). Both are evaluated, since a branch per element would serialise the latencies of the special function unit.
// Layout: x [T, V] dense rows, out [T, V] contiguous. Rows that lie end to end, or start and end at multiples of 16 bytes, take
// map_kernel. Else shifted_kernel goes by the vectors of out: it builds each one from the two aligned vectors of x that hold its bytes,
// and by scalar loads where out's rows meet. Bytes of x's first and last 16 around a row are read and dropped; nothing else is.
// Best measured: H200, as the share of a copy of the same bytes: bf16 100 %, fp32 99 %.
// Limits: V at most 2^27, 0 < cap < inf.
#pragma once
#include "fused/activations.cuh"
#include "fused/elementwise.cuh"
#include "fused/softcap.h"

namespace pyllm::fused {

__device__ __forceinline__ float precise_tanh(float y) {
  const float a = fabsf(y), z = y * y;
  const float large = fmaf(-2.f, fast_reciprocal(1.f + fast_exp2(2.f * kLog2E * a)), 1.f);
  float p = fmaf(0.0156126125f, z, -0.0522117913f);
  p = fmaf(p, z, 0.133131161f);
  p = fmaf(p, z, -0.333325982f);
  return a < 0.6f ? fmaf(y * z, p, y) : copysignf(large, y);
}

template <bool Fast>
struct Softcap {
  float cap, inverse;
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (Fast) return cap * fast_tanh(x * inverse);
    return cap * precise_tanh(x * inverse);
  }
};

// 16 bytes at any multiple of sizeof(T).
template <class T>
__device__ __forceinline__ uint4 load_shifted(const char* p) {
  const auto shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p) % 16);
  const char* const aligned = p - shift;
  const uint4 low = load_vector(aligned), high = shift == 0 ? low : load_vector(aligned + 16);
  uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = shift & 4 ? w[i + 1] : w[i];
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = __funnelshift_r(w[i], w[i + 1], (shift & 2) * 8);
  }
  return {w[0], w[1], w[2], w[3]};
}

struct ShiftedArgs {
  const char* x;      // rows of T, row_bytes apart
  char* out;          // contiguous, at a multiple of 16 bytes
  int64_t row_bytes;  // any multiple of sizeof(T)
  uint32_t elements;  // of out
  RowSplit split;     // of out's elements
};

template <class T, int Threads, int Vectors, class F>
__global__ void __launch_bounds__(Threads) shifted_kernel(const __grid_constant__ ShiftedArgs a, F f) {
  constexpr uint32_t kItems = kWidth<T>;
  const uint32_t first = (blockIdx.x * (Threads * Vectors) + threadIdx.x) * kItems;
  uint4 raw[Vectors];
  pdl_wait();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    const uint32_t i = first + k * Threads * kItems;
    if (i >= a.elements) break;
    RowCol at = split_index(a.split, i);
    // Two aligned words hold a shifted one; behind the last row nothing may be read, so its end goes by elements.
    if (at.col + kItems <= a.split.width && i + 2 * kItems <= a.elements) {
      raw[k] = load_shifted<T>(a.x + at.row * a.row_bytes + static_cast<int64_t>(at.col) * sizeof(T));
      continue;
    }
    alignas(16) T parts[kItems] = {};
#pragma unroll
    for (uint32_t j = 0; j < kItems; ++j) {
      if (i + j < a.elements) parts[j] = reinterpret_cast<const T*>(a.x + at.row * a.row_bytes)[at.col];
      if (++at.col == a.split.width) at = {at.row + 1, 0};
    }
    raw[k] = *reinterpret_cast<const uint4*>(parts);
  }
  pdl_trigger();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    const uint32_t i = first + k * Threads * kItems;
    if (i >= a.elements) break;
    char* const to = a.out + static_cast<int64_t>(i) * sizeof(T);
    alignas(16) T parts[kItems];
    *reinterpret_cast<uint4*>(parts) = map_vector<T>(raw[k], f);
    if (i + kItems <= a.elements) {
      store_vector(to, *reinterpret_cast<const uint4*>(parts));
      continue;
    }
#pragma unroll
    for (uint32_t j = 0; j < kItems; ++j) {
      if (i + j < a.elements) reinterpret_cast<T*>(to)[j] = parts[j];
    }
  }
}

template <class T, class F>
void launch_shifted(const SoftcapParams& p, F f, cudaStream_t stream) {
  const int64_t row_bytes = p.x_stride * static_cast<int64_t>(sizeof(T)), out_bytes = p.width * static_cast<int64_t>(sizeof(T));
  // 8 rows at a time, so that the output of each launch starts at a multiple of 16 bytes.
  in_launches(
      "softcap", p.tokens, p.width,
      [&](int64_t first, int64_t count) {
        const ShiftedArgs a{static_cast<const char*>(p.x) + first * row_bytes, static_cast<char*>(p.out) + first * out_bytes, row_bytes,
                            static_cast<uint32_t>(count * p.width), row_split(p.width)};
        const int64_t vectors = (count * p.width + kWidth<T> - 1) / kWidth<T>;
        if (is_large(vectors)) {
          launch("softcap", {ctas(vectors, kThreads * kVectors), kThreads}, stream, shifted_kernel<T, kThreads, kVectors, F>, a, f);
        } else {
          launch("softcap", {ctas(vectors, kSmallThreads), kSmallThreads}, stream, shifted_kernel<T, kSmallThreads, 1, F>, a, f);
        }
      },
      8);
}

template <class T>
void launch_softcap(const SoftcapParams& p, cudaStream_t stream) {
  constexpr int64_t kItem = sizeof(T);
  const Softcap<std::is_same_v<T, __nv_bfloat16>> f{p.cap, 1.f / p.cap};
  const bool end_to_end = p.tokens <= 1 || p.x_stride == p.width;
  const bool aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
  if (aligned && (end_to_end || (p.x_stride * kItem % 16 == 0 && p.width * kItem % 16 == 0))) {
    launch_map<T>("softcap", p.x, p.out, p.tokens, p.width, p.x_stride * kItem, f, stream);
  } else {
    launch_shifted<T>(p, f, stream);
  }
}

}  // namespace pyllm::fused
