// What the element-wise kernels share on the device: 16-byte vectors to and from fp32, and the kernel of unary maps.
//
// Layout: rows of dense elements, a row a multiple of 16 bytes at a multiple of 16 bytes; outputs contiguous. Thread i of the grid owns
// the vectors i, i + Threads, ... of its CTA's piece of the flat output, all loads issued before the first store.
// Limits: rows * vectors per row * vectors per row below 2^64 (flat_plan checks).
#pragma once
#include "common/launch.h"
#include "common/vec.cuh"
#include "fused/elementwise.h"

namespace pyllm::fused {

// Elements of T in one 16-byte access.
template <class T>
inline constexpr int kWidth = 16 / sizeof(T);

template <class T>
__device__ __forceinline__ void unpack(const uint4& raw, float (&out)[kWidth<T>]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      out[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // bf16 is the upper half of fp32
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float (&x)[kWidth<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// Input that is read once. Never ld.global.nc: a predecessor may just have written it.
__device__ __forceinline__ uint4 load_once(const void* p) {
#if PYLLM_FUSED_STREAM_LOADS
  return __ldcs(static_cast<const uint4*>(p));
#else
  return *static_cast<const uint4*>(p);
#endif
}
__device__ __forceinline__ void store_out(void* p, const uint4& x) {
#if PYLLM_FUSED_STREAM_STORES
  __stcs(static_cast<uint4*>(p), x);
#else
  *static_cast<uint4*>(p) = x;
#endif
}

struct RowCol {
  int64_t row, col;
};
__device__ __forceinline__ RowCol split_index(const RowSplit& split, int64_t i) {
  const int64_t row = split.magic == 0 ? i : static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(i), split.magic));
  return {row, i - row * split.vectors};
}

struct MapArgs {
  const char* x;      // rows of T, row_bytes apart
  char* out;          // contiguous
  int64_t row_bytes;  // multiple of 16
  FlatPlan plan;
};

// out[i] = round(f(x[i])), f on fp32.
template <class T, int Threads, int Vectors, class F>
__global__ void __launch_bounds__(Threads) map_kernel(MapArgs a, F f) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (Threads * Vectors) + threadIdx.x;
  const char* from[Vectors];
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    const RowCol at = split_index(a.plan.split, first + k * Threads);
    from[k] = a.x + at.row * a.row_bytes + at.col * 16;
  }
  uint4 raw[Vectors];
  pdl_wait();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    if (first + k * Threads < a.plan.total) raw[k] = load_once(from[k]);
  }
  pdl_trigger();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    const int64_t i = first + k * Threads;
    if (i >= a.plan.total) break;
    float v[kWidth<T>];
    unpack<T>(raw[k], v);
#pragma unroll
    for (int j = 0; j < kWidth<T>; ++j) v[j] = f(v[j]);
    store_out(a.out + i * 16, pack<T>(v));
  }
}

template <class T, int Vectors, class F>
void launch_map(const char* name, const MapArgs& a, F f, cudaStream_t stream) {
  if (a.plan.total == 0) return;
  if (is_large(a.plan.total)) {
    launch(name, {ctas(a.plan.total, kThreads * Vectors), kThreads}, stream, map_kernel<T, kThreads, Vectors, F>, a, f);
  } else {
    launch(name, {ctas(a.plan.total, kSmallThreads), kSmallThreads}, stream, map_kernel<T, kSmallThreads, 1, F>, a, f);
  }
}

}  // namespace pyllm::fused
