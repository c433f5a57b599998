// What the element-wise kernels share on the device: 16-byte vectors to and from fp32, and the kernel of unary maps.
//
// Layout: rows of dense elements, a row a multiple of 16 bytes at a multiple of 16 bytes; outputs contiguous. Thread i of a CTA owns
// the vectors i, i + Threads, ... of its piece of the flat output, all loads issued before the first store. Rows that lie end to end
// count as one (Flat): no division, and the vectors of a thread are one address and constant offsets.
// Limits: 2^30 vectors per launch (in_launches).
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

// Never ld.global.nc: a predecessor may just have written it.
__device__ __forceinline__ uint4 load_vector(const void* p) { return *static_cast<const uint4*>(p); }
// Plain: with st.global.cs act falls by 1 to 3 % of a copy, softcap by 1.5 %, and the next kernel reads the output.
__device__ __forceinline__ void store_vector(void* p, const uint4& x) { *static_cast<uint4*>(p) = x; }

struct RowCol {
  uint32_t row, col;
};
__device__ __forceinline__ RowCol split_index(const RowSplit& split, uint32_t i) {
  const uint32_t row = split.magic == 0 ? i : __umulhi(i, split.magic) >> split.shift;
  return {row, i - row * split.width};
}

// The vector at `at` of rows that are row_bytes apart.
__device__ __forceinline__ const char* vector_at(const char* x, int64_t row_bytes, const RowCol& at) {
  return x + at.row * row_bytes + static_cast<int64_t>(at.col) * 16;
}

struct MapArgs {
  const char* x;      // rows of T, row_bytes apart
  char* out;          // contiguous
  int64_t row_bytes;  // multiple of 16
  uint32_t total;     // vectors of out
  uint32_t tail;      // Flat: elements behind them, fewer than a vector
  RowSplit split;     // of out's vectors
};

template <class T, class F>
__device__ __forceinline__ uint4 map_vector(const uint4& raw, F f) {
  float v[kWidth<T>];
  unpack<T>(raw, v);
#pragma unroll
  for (int j = 0; j < kWidth<T>; ++j) v[j] = f(v[j]);
  return pack<T>(v);
}

template <class T, class F>
__device__ __forceinline__ void map_element(const char* x, char* out, int64_t i, F f) {
  reinterpret_cast<T*>(out)[i] = from_float<T>(f(to_float(reinterpret_cast<const T*>(x)[i])));
}

// out[i] = round(f(x[i])), f on fp32.
template <class T, int Threads, int Vectors, bool Flat, class F>
__global__ void __launch_bounds__(Threads) map_kernel(const __grid_constant__ MapArgs a, F f) {
  const uint32_t first = blockIdx.x * (Threads * Vectors) + threadIdx.x;
  const char* from[Vectors];
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    if constexpr (Flat) {
      from[k] = a.x + static_cast<int64_t>(first) * 16 + k * Threads * 16;
    } else {
      from[k] = vector_at(a.x, a.row_bytes, split_index(a.split, first + k * Threads));
    }
  }
  char* const to = a.out + static_cast<int64_t>(first) * 16;
  uint4 raw[Vectors];
  pdl_wait();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    if (first + k * Threads < a.total) raw[k] = load_vector(from[k]);
  }
  pdl_trigger();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    if (first + k * Threads < a.total) store_vector(to + k * Threads * 16, map_vector<T>(raw[k], f));
  }
  if (Flat && threadIdx.x < a.tail && blockIdx.x == gridDim.x - 1) {
    map_element<T>(a.x, a.out, static_cast<int64_t>(a.total) * kWidth<T> + threadIdx.x, f);
  }
}

template <class T, bool Flat, class F>
void launch_map_piece(const char* name, const MapArgs& a, F f, cudaStream_t stream) {
  if (is_large(a.total)) {
    launch(name, {ctas(a.total, kThreads * kVectors), kThreads}, stream, map_kernel<T, kThreads, kVectors, Flat, F>, a, f);
  } else {
    launch(name, {std::max(1u, ctas(a.total, kSmallThreads)), kSmallThreads}, stream, map_kernel<T, kSmallThreads, 1, Flat, F>, a, f);
  }
}

// x: rows of `width` elements, row_bytes apart, at multiples of 16 bytes; width a multiple of 8, or any where the rows lie end to end.
template <class T, class F>
void launch_map(const char* name, const void* x, void* out, int64_t rows, int64_t width, int64_t row_bytes, F f, cudaStream_t stream) {
  const char* const from = static_cast<const char*>(x);
  char* const to = static_cast<char*>(out);
  const int64_t out_bytes = width * static_cast<int64_t>(sizeof(T));
  if (rows <= 1 || row_bytes == out_bytes) {
    const int64_t vectors = rows * width / kWidth<T>;
    const auto tail = static_cast<uint32_t>(rows * width % kWidth<T>);
    if (vectors == 0 && tail > 0) launch_map_piece<T, true>(name, {from, to, 0, 0, tail, {}}, f, stream);
    in_launches(name, vectors, 1, [&](int64_t first, int64_t count) {
      const MapArgs a{from + first * 16, to + first * 16, 0, static_cast<uint32_t>(count), first + count == vectors ? tail : 0, {}};
      launch_map_piece<T, true>(name, a, f, stream);
    });
    return;
  }
  const int64_t vectors = width / kWidth<T>;
  in_launches(name, rows, vectors, [&](int64_t first, int64_t count) {
    const MapArgs a{from + first * row_bytes, to + first * out_bytes, row_bytes, static_cast<uint32_t>(count * vectors), 0,
                    row_split(vectors)};
    launch_map_piece<T, false>(name, a, f, stream);
  });
}

}  // namespace pyllm::fused
