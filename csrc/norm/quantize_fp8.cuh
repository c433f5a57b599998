// quantize_fp8: scale = max(absmax / 448, 1e-10), q = e4m3_rn_sat(x * (1 / scale)), IEEE fp32 divisions; NaN does not count as a
// maximum and becomes NaN. absmax over a row (token), a 1x128 group (group), everything (tensor), or the scale is given (static).
//
// Layout: rows as in row.cuh, held in registers from the load to the store, a row per CTA. A 1x128 group is 16 (fp32: 32) neighbouring
// lanes, so its maximum needs no barrier. Mode tensor: in a first kernel one wave of CTAs walks the rows, the next one in flight, and
// leaves a maximum per CTA; the second reduces those in every CTA (2 KB from L1 or L2, behind the loads of the row): nothing to reset,
// no atomics, and a maximum has no order.
// Limits: n a multiple of 8 up to 32768; x and its row stride 16-byte aligned.
#pragma once
#include "common/dispatch.h"
#include "norm/quantize_fp8.h"
#include "norm/row.cuh"

namespace pyllm::norm {

enum class Scaling { kRow, kGroup, kGiven };  // kGiven: static, and the second pass of tensor

template <class T, int Vectors>
__device__ __forceinline__ void load_row(const QuantizeParams& p, const RowThreads<Vectors>& at, int64_t row, bool ok, uint4* x) {
  const T* from = static_cast<const T*>(p.x) + row * p.x_stride + at.first * kVec<T>;
#pragma unroll
  for (int j = 0; j < Vectors; ++j) x[j] = load_vector(from + j * 32 * kVec<T>, ok && at.vector(j) * kVec<T> < p.n);
}

__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b, __nv_bfloat16) {
  uint32_t m;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b & 0x7fff7fffu));
  return m;
}
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b, __half) {
  uint32_t m;
  asm("max.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b & 0x7fff7fffu));
  return m;
}

// Largest magnitude of `Count` vectors; NaN does not count. Two halves at a time: a quarter of the instructions of fp32.
template <class T, int Count>
__device__ __forceinline__ float absmax_of(const uint4* x) {
  if constexpr (sizeof(T) == 4) {
    float m = 0.f;
#pragma unroll
    for (int j = 0; j < Count; ++j) {
      float f[4];
      unpack<T>(x[j], f);
#pragma unroll
      for (int i = 0; i < 4; ++i) m = fmaxf(m, fabsf(f[i]));
    }
    return m;
  } else {
    uint32_t m = 0;  // max(0, NaN) is 0
#pragma unroll
    for (int j = 0; j < Count; ++j) {
      m = larger_magnitudes(m, x[j].x, T{});
      m = larger_magnitudes(m, x[j].y, T{});
      m = larger_magnitudes(m, x[j].z, T{});
      m = larger_magnitudes(m, x[j].w, T{});
    }
    float lo, hi;
    unpack(m, lo, hi, T{});
    return fmaxf(lo, hi);
  }
}

// Over all threads of the CTA, whatever rows they hold. Called once per kernel, so its slots are used once.
__device__ __forceinline__ float cta_max(float x, float* slots) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / 32;
  x = warp_reduce(x, MaxOp{});
  if (thread % 32 == 0) slots[thread / 32] = x;
  __syncthreads();
  return warp_reduce(thread % 32 < warps ? slots[thread % 32] : 0.f, MaxOp{});
}

template <class T, class Layout>
__global__ void __launch_bounds__(Layout::kCtaThreads, Layout::min_ctas(2 * Layout::kVectors))
    absmax_kernel(const __grid_constant__ QuantizeParams p, const RowPlan plan) {
  constexpr int kN = Layout::kVectors;
  __shared__ RowScratch scratch;
  const RowThreads<kN> at(plan, scratch);
  at.arrive();
  at.wait();
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  float absmax = 0.f;
  uint4 next[kN];
  load_row<T>(p, at, at.first_row, at.first_row < rows, next);
  for (uint32_t i = at.first_row; i < rows; i += plan.row_step) {
    uint4 x[kN];
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] = next[j];
    load_row<T>(p, at, i + plan.row_step, i + plan.row_step < rows, next);
    absmax = fmaxf(absmax, absmax_of<T, kN>(x));
  }
  absmax = cta_max(absmax, &scratch.slots[0][0].x);
  if (threadIdx.x == 0 && threadIdx.y == 0) p.partials[blockIdx.x] = absmax;
}

// partials: maxima that the first pass of mode tensor left, 0 in other modes.
template <class T, class Layout, Scaling S>
__global__ void __launch_bounds__(Layout::kCtaThreads, Layout::min_ctas(Layout::kVectors))
    quantize_kernel(const __grid_constant__ QuantizeParams p, const RowPlan plan, const int partials) {
  constexpr int kN = Layout::kVectors, kV = kVec<T>, kGroupLanes = kQuantGroup / kV;
  __shared__ RowScratch scratch;
  RowThreads<kN> at(plan, scratch);
  at.arrive();
  at.wait();
  const bool live = at.first_row < p.rows;  // a warp may be without a row; a CTA has one, unless there are none at all
  // The second pass of mode tensor walks backwards: the rows that the first pass read last are still in L2.
  const int64_t row = S == Scaling::kGiven && partials > 0 ? p.rows - 1 - at.first_row : at.first_row;

  uint4 x[kN];
  load_row<T>(p, at, row, live, x);
  float inv = 0.f;
  if constexpr (S == Scaling::kGiven) {
    float scale;
    if (partials > 0) {
      const int thread = threadIdx.y * blockDim.x + threadIdx.x;
      float absmax = 0.f;
      for (int i = thread; i < partials; i += blockDim.x * blockDim.y) absmax = fmaxf(absmax, p.partials[i]);
      scale = scale_of(cta_max(absmax, &scratch.slots[0][0].x));
    } else {
      scale = *p.scale;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *p.scale_out = scale;
    inv = inverse(scale);
  }
  if (!live) return;

  if constexpr (S == Scaling::kRow) {
    const float scale = scale_of(at.reduce(absmax_of<T, kN>(x), MaxOp{}));
    if (at.first == 0) p.scale_out[row] = scale;
    inv = inverse(scale);
  }
  uint8_t* out = p.out + row * p.n + at.first * kV;
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    const int column = at.vector(j) * kV;
    if constexpr (S == Scaling::kGroup) {
      const float scale = scale_of(warp_reduce<MaxOp, kGroupLanes>(absmax_of<T, 1>(x + j), MaxOp{}));
      if (column % kQuantGroup == 0 && column < p.n)
        p.scale_out[row * ((p.n + kQuantGroup - 1) / kQuantGroup) + column / kQuantGroup] = scale;
      inv = inverse(scale);
    }
    float f[kV];
    unpack<T>(x[j], f);
    store_e4m3<kV>(out + j * 32 * kV, f, inv, column < p.n);
  }
}

template <class T>
void run_quantize(const QuantizeParams& p, cudaStream_t stream) {
  with_layout<sizeof(T) == 4 ? 8 : 4>(p.rows, p.n, sizeof(T), [&]<class Layout>(Layout, const Grid& g) {
    const auto start = [&](auto* kernel, int partials) {
      launch("quantize_fp8", {.grid = dim3(g.grid), .block = g.block, .cluster = g.cluster}, stream, kernel, p, g.plan, partials);
    };
    switch (p.mode) {
      case QuantMode::kToken:
        return start(&quantize_kernel<T, Layout, Scaling::kRow>, 0);
      case QuantMode::kGroup:
        return start(&quantize_kernel<T, Layout, Scaling::kGroup>, 0);
      case QuantMode::kStatic:
        return start(&quantize_kernel<T, Layout, Scaling::kGiven>, 0);
      case QuantMode::kTensor: {
        // 1024 threads per SM: with a row in hand and one in flight each, enough to read at full speed.
        const int wave = std::max<int>(1024 / (g.block.x * g.block.y), 1) * sm_count();
        const unsigned ctas = std::min<unsigned>(g.grid, std::min(wave, kMaxQuantPartials) / g.cluster * g.cluster);
        RowPlan plan = g.plan;
        plan.row_step = ctas / g.cluster * g.block.y;
        launch("quantize_fp8", {.grid = dim3(ctas), .block = g.block, .cluster = g.cluster}, stream, &absmax_kernel<T, Layout>, p, plan);
        return start(&quantize_kernel<T, Layout, Scaling::kGiven>, static_cast<int>(ctas));
      }
    }
  });
}

}  // namespace pyllm::norm
