// quantize_fp8: scale = max(absmax / 448, 1e-10), q = e4m3_rn_sat(x * (1 / scale)), IEEE fp32 divisions; NaN does not count as a
// maximum and becomes NaN. absmax over a row (token), a 1x128 group (group), everything (tensor), or the scale is given (static).
//
// Layout: rows as in row.cuh, held in registers from the load to the store; the next row of a CTA is in flight meanwhile. A 1x128 group
// is 16 (fp32: 32) neighbouring lanes, so its maximum needs no barrier. Mode tensor: one kernel leaves a maximum per CTA, the second
// reduces those in every CTA (a few KB from L2): nothing to reset, no atomics, and a maximum has no order.
// Limits: n a multiple of 8 up to 32768; x and its row stride 16-byte aligned.
#pragma once
#include "common/dispatch.h"
#include "norm/quantize_fp8.h"
#include "norm/row.cuh"

namespace pyllm::norm {

enum class Scaling { kRow, kGroup, kGiven };  // kGiven: static, and the second pass of tensor

// A row in registers, and the loop over rows with the next one in flight.
template <class T, int Vectors>
struct RowLoader {
  const QuantizeParams& p;
  const RowThreads<Vectors>& at;
  uint4 x[Vectors];

  __device__ __forceinline__ void load(int64_t row, bool ok) {
    const T* from = static_cast<const T*>(p.x) + row * p.x_stride + at.first * kVec<T>;
#pragma unroll
    for (int j = 0; j < Vectors; ++j) x[j] = load_stream(from + j * 32 * kVec<T>, ok && at.vector(j) * kVec<T> < p.n);
  }
};

template <class T>
__device__ __forceinline__ float absmax_of(const uint4& x) {
  float f[kVec<T>], m = 0.f;
  unpack<T>(x, f);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) m = fmaxf(m, fabsf(f[i]));
  return m;
}

// Over all threads of the CTA, whatever rows they hold. Called once per kernel, so its slots are used once.
__device__ __forceinline__ float cta_max(float x, float* slots) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, warps = blockDim.x * blockDim.y / 32;
  x = warp_reduce(x, MaxOp{});
  if (thread % 32 == 0) slots[thread / 32] = x;
  __syncthreads();
  return warp_reduce(thread % 32 < warps ? slots[thread % 32] : 0.f, MaxOp{});
}

template <class T, int Vectors>
__global__ void __launch_bounds__(kMaxThreads, Vectors == 2 ? PYLLM_NORM_MIN_CTAS : 1)
    absmax_kernel(const __grid_constant__ QuantizeParams p, const RowPlan plan) {
  __shared__ RowScratch scratch;
  const RowThreads<Vectors> at(plan, scratch);
  at.arrive();
  at.wait();
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  float absmax = 0.f;
  RowLoader<T, Vectors> row{p, at, {}};
  row.load(at.first_row, at.first_row < rows);
  for (uint32_t i = at.first_row; i < rows; i += plan.row_step) {
    RowLoader<T, Vectors> current = row;
    row.load(i + plan.row_step, i + plan.row_step < rows);
#pragma unroll
    for (int j = 0; j < Vectors; ++j) absmax = fmaxf(absmax, absmax_of<T>(current.x[j]));
  }
  absmax = cta_max(absmax, scratch.slots[0]);
  if (threadIdx.x == 0 && threadIdx.y == 0) p.partials[blockIdx.x] = absmax;
}

template <class T, int Vectors, Scaling S>
__global__ void __launch_bounds__(kMaxThreads, Vectors == 2 ? PYLLM_NORM_MIN_CTAS : 1)
    quantize_kernel(const __grid_constant__ QuantizeParams p, const RowPlan plan, const int partials) {
  constexpr int kV = kVec<T>, kGroupLanes = kQuantGroup / kV;
  __shared__ RowScratch scratch;
  RowThreads<Vectors> at(plan, scratch);
  at.arrive();
  at.wait();
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  // The second pass of mode tensor walks backwards: the rows that the first pass read last are still in L2.
  const auto place = [&](uint32_t i) -> int64_t { return S == Scaling::kGiven && partials > 0 ? rows - 1 - i : i; };

  RowLoader<T, Vectors> row{p, at, {}};
  row.load(place(at.first_row), at.first_row < rows);
  float inv = 0.f;
  if constexpr (S == Scaling::kGiven) {
    float scale;
    if (partials > 0) {
      const int thread = threadIdx.y * blockDim.x + threadIdx.x;
      float absmax = 0.f;
      for (int i = thread; i < partials; i += blockDim.x * blockDim.y) absmax = fmaxf(absmax, p.partials[i]);
      scale = scale_of(cta_max(absmax, scratch.slots[0]));
    } else {
      scale = *p.scale;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) *p.scale_out = scale;
    inv = inverse(scale);
  }

  for (uint32_t i = at.first_row; i < rows; i += plan.row_step) {
    const int64_t here = place(i);
    const RowLoader<T, Vectors> current = row;
    row.load(place(i + plan.row_step), i + plan.row_step < rows);
    if constexpr (S == Scaling::kRow) {
      float absmax = 0.f;
#pragma unroll
      for (int j = 0; j < Vectors; ++j) absmax = fmaxf(absmax, absmax_of<T>(current.x[j]));
      const float scale = scale_of(at.reduce(absmax, MaxOp{}));
      if (at.first == 0) p.scale_out[here] = scale;
      inv = inverse(scale);
    }
#pragma unroll
    for (int j = 0; j < Vectors; ++j) {
      const int column = at.vector(j) * kV;
      if constexpr (S == Scaling::kGroup) {
        const float scale = scale_of(warp_reduce<MaxOp, kGroupLanes>(absmax_of<T>(current.x[j]), MaxOp{}));
        if (column % kQuantGroup == 0 && column < p.n)
          p.scale_out[here * ((p.n + kQuantGroup - 1) / kQuantGroup) + column / kQuantGroup] = scale;
        inv = inverse(scale);
      }
      if (column >= p.n) continue;
      float f[kV];
      unpack<T>(stay_packed(current.x[j]), f);
      store_e4m3<kV>(p.out + here * p.n + column, f, inv);
    }
  }
}

template <class T, int Vectors>
void run_quantize(const QuantizeParams& p, int threads, cudaStream_t stream) {
  const auto start = [&](auto* kernel, int partials) {
    const Grid g = plan_grid(kernel, p.rows, p.n, sizeof(T), threads);
    launch("quantize_fp8", {.grid = dim3(g.grid), .block = g.block, .cluster = g.cluster}, stream, kernel, p, g.plan, partials);
  };
  switch (p.mode) {
    case QuantMode::kToken:
      return start(&quantize_kernel<T, Vectors, Scaling::kRow>, 0);
    case QuantMode::kGroup:
      return start(&quantize_kernel<T, Vectors, Scaling::kGroup>, 0);
    case QuantMode::kStatic:
      return start(&quantize_kernel<T, Vectors, Scaling::kGiven>, 0);
    case QuantMode::kTensor: {
      auto* kernel = &absmax_kernel<T, Vectors>;
      Grid g = plan_grid(kernel, p.rows, p.n, sizeof(T), threads);
      const unsigned ctas = std::min<unsigned>(g.grid, kMaxQuantPartials);
      g.plan.row_step = ctas / g.cluster * g.block.y;
      launch("quantize_fp8", {.grid = dim3(ctas), .block = g.block, .cluster = g.cluster}, stream, kernel, p, g.plan);
      return start(&quantize_kernel<T, Vectors, Scaling::kGiven>, static_cast<int>(ctas));
    }
  }
}

}  // namespace pyllm::norm
