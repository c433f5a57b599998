// The kernel behind rms_norm and layer_norm, parameterised by a formula:
//   h = residual ? round(x + residual) : x       (written back to residual)
//   y = formula(h) in fp32, stored once: as dtype, or as e4m3_rn_sat(y * (1 / scale)) with a given scale or one per row.
//
// Layout: rows as in row.cuh, held in registers from the load to the store: x and residual are read once, out and residual written
// once. A CTA that walks several rows has the loads of its next row in flight while it reduces and stores the current one.
// Limits: n a multiple of 8 up to 32768; x, residual, weight and bias 16-byte aligned, row strides too.
#pragma once
#include "common/dispatch.h"
#include "norm/norm_row.h"
#include "norm/row.cuh"

namespace pyllm::norm {

template <class T_, class W_, int Vectors, bool Residual, NormQuant Quant>
struct NormConfig {
  using T = T_;
  using W = W_;
  static constexpr int kVectors = Vectors, kMinCtas = Vectors == 2 ? PYLLM_NORM_MIN_CTAS : 1;
  static constexpr bool kResidual = Residual;
  static constexpr NormQuant kQuant = Quant;
  static constexpr bool kPrefetch = norm::kPrefetch && Vectors <= 4;  // 8 vectors of the next row would not fit 128 registers
  static constexpr int kV = kVec<T>;
  static constexpr int kWords = kV * static_cast<int>(sizeof(W)) / 16;  // 16-byte loads of weights per vector
};

// One row in registers, as the formulas see it.
template <class C>
struct Row {
  uint4 h[C::kVectors];
  RowThreads<C::kVectors>& threads;
  int vectors;

  __device__ __forceinline__ bool has(int j) const { return threads.vector(j) < vectors; }
  __device__ __forceinline__ void values(int j, float* f) const { unpack<typename C::T>(stay_packed(h[j]), f); }
};

// Columns of weight or bias. Their way from DRAM starts ahead of pdl_wait(): into registers where there are enough, else into L2.
template <class C, bool Keep>
struct Columns {
  const char* base;
  uint4 kept[Keep ? C::kVectors * C::kWords : 1];

  __device__ __forceinline__ Columns(const void* p, const RowThreads<C::kVectors>& threads, int vectors)
      : base(static_cast<const char*>(p)) {
#pragma unroll
    for (int j = 0; j < C::kVectors; ++j) {
      const bool ok = base != nullptr && threads.vector(j) < vectors;
      if constexpr (Keep) {
#pragma unroll
        for (int i = 0; i < C::kWords; ++i) kept[j * C::kWords + i] = word(threads.vector(j), i, ok);
      } else if (ok) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(base + static_cast<int64_t>(threads.vector(j)) * C::kWords * 16));
      }
    }
  }
  __device__ __forceinline__ uint4 word(int vector, int i, bool ok) const {
    return load_constant(base + (static_cast<int64_t>(vector) * C::kWords + i) * 16, ok);
  }
  __device__ __forceinline__ void values(int j, int vector, float* f) const {
#pragma unroll
    for (int i = 0; i < C::kWords; ++i) {
      unpack<typename C::W>(Keep ? stay_packed(kept[j * C::kWords + i]) : word(vector, i, base != nullptr), f + i * kVec<typename C::W>);
    }
  }
};

// Two vectors per thread and FP8 output of layer_norm need up to 80 registers: one CTA of 512 threads instead of two.
template <class Formula, class C>
__global__ void __launch_bounds__(kMaxThreads, Formula::kBias&& C::kQuant != NormQuant::kNone ? 1 : C::kMinCtas)
    norm_kernel(const __grid_constant__ NormParams p, const RowPlan plan) {
  using T = typename C::T;
  constexpr int kV = C::kV, kN = C::kVectors;
  // Columns live in registers (ahead of the wait, off the critical path of a single row) unless they and the residual would spill.
  constexpr bool kKeep = kN <= 4 && C::kWords * (Formula::kBias ? 2 : 1) + C::kResidual <= 2;
  __shared__ RowScratch scratch;

  RowThreads<kN> at(plan, scratch);
  const int vectors = p.n / kV;
  const uint32_t rows = static_cast<uint32_t>(p.rows);
  const Columns<C, kKeep> weight(p.weight, at, vectors);
  const Columns<C, kKeep && Formula::kBias> bias(Formula::kBias ? p.bias : nullptr, at, vectors);
  at.arrive();
  at.wait();

  uint4 x[kN], r[C::kResidual ? kN : 1];
  const auto load = [&](uint32_t row) {
    const T* from = static_cast<const T*>(p.x) + static_cast<int64_t>(row) * p.x_stride + at.first * kV;
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] = load_stream(from + j * 32 * kV, row < rows && at.vector(j) < vectors);
    if constexpr (C::kResidual) {
      const T* other = static_cast<const T*>(p.residual) + static_cast<int64_t>(row) * p.residual_stride + at.first * kV;
#pragma unroll
      for (int j = 0; j < kN; ++j) r[j] = load_stream(other + j * 32 * kV, row < rows && at.vector(j) < vectors);
    }
  };
  if constexpr (C::kPrefetch) load(at.first_row);
  float inv = C::kQuant == NormQuant::kStatic ? inverse(*p.scale) : 0.f;  // after the loads: the division waits for the scale

  for (uint32_t row = at.first_row; row < rows; row += plan.row_step) {
    if constexpr (!C::kPrefetch) load(row);
    Row<C> a{{}, at, vectors};
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      if constexpr (C::kResidual) {
        float f[kV], g[kV];
        unpack<T>(x[j], f);
        unpack<T>(r[j], g);
#pragma unroll
        for (int i = 0; i < kV; ++i) f[i] += g[i];
        a.h[j] = pack<T>(f);
      } else {
        a.h[j] = x[j];
      }
    }
    if constexpr (C::kPrefetch) load(row + plan.row_step);
    if constexpr (C::kResidual) {
      T* to = static_cast<T*>(p.residual) + static_cast<int64_t>(row) * p.residual_stride + at.first * kV;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        if (a.has(j)) store_row(to + j * 32 * kV, a.h[j]);
      }
    }

    const Formula formula(a, plan.inv_n, p.eps);
    const auto result = [&](int j, float* y) {
      float w[kV], b[kV] = {};
      a.values(j, y);
      weight.values(j, at.vector(j), w);
      if constexpr (Formula::kBias) bias.values(j, at.vector(j), b);
#pragma unroll
      for (int i = 0; i < kV; ++i) y[i] = formula(y[i], w[i], b[i]);
    };

    if constexpr (C::kQuant == NormQuant::kNone) {
      T* to = static_cast<T*>(p.out) + static_cast<int64_t>(row) * p.n + at.first * kV;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        if (!a.has(j)) continue;
        float y[kV];
        result(j, y);
        store_row(to + j * 32 * kV, pack<T>(y));
      }
    } else {
      uint8_t* to = static_cast<uint8_t*>(p.out) + static_cast<int64_t>(row) * p.n + at.first * kV;
      float y[kN][kV] = {};
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        if (a.has(j)) result(j, y[j]);
      }
      if constexpr (C::kQuant == NormQuant::kToken) {
        float absmax = 0.f;
#pragma unroll
        for (int j = 0; j < kN; ++j) {
#pragma unroll
          for (int i = 0; i < kV; ++i) absmax = fmaxf(absmax, fabsf(y[j][i]));
        }
        const float scale = scale_of(at.reduce(absmax, MaxOp{}));
        if (at.first == 0) p.scale_out[row] = scale;
        inv = inverse(scale);
      }
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        if (a.has(j)) store_e4m3<kV>(to + j * 32 * kV, y[j], inv);
      }
    }
  }
}

template <template <class> class Formula, class C>
void launch_norm(const char* name, const NormParams& p, int threads, cudaStream_t stream) {
  auto* kernel = &norm_kernel<Formula<C>, C>;
  const Grid g = plan_grid(kernel, p.rows, p.n, sizeof(typename C::T), threads);
  launch(name, {.grid = dim3(g.grid), .block = g.block, .cluster = g.cluster}, stream, kernel, p, g.plan);
}

template <template <class> class Formula>
void run_norm(const char* name, const NormParams& p, cudaStream_t stream) {
  const auto by_shape = [&](auto t, auto w) {
    using T = typename decltype(t)::type;
    using W = typename decltype(w)::type;
    const auto [shape, threads] = choose_threads(p.n / kVec<T>);
    const auto with = [&, shape = shape, threads = threads](auto residual, auto quant) {
      constexpr bool kR = decltype(residual)::value;
      constexpr NormQuant kQ = static_cast<NormQuant>(decltype(quant)::value);
      switch (shape) {
        case Shape::kTwo:
          return launch_norm<Formula, NormConfig<T, W, 2, kR, kQ>>(name, p, threads, stream);
        case Shape::kFour:
          return launch_norm<Formula, NormConfig<T, W, 4, kR, kQ>>(name, p, threads, stream);
        case Shape::kEight:
          if constexpr (sizeof(T) == 4) return launch_norm<Formula, NormConfig<T, W, 8, kR, kQ>>(name, p, threads, stream);
      }
    };
    dispatch_bool(p.residual != nullptr, [&](auto residual) {
      dispatch<0, 1, 2>("quant", static_cast<int>(p.quant), [&](auto quant) { with(residual, quant); });
    });
  };
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>(name, p.dtype, [&](auto t) {
    if constexpr (!std::is_same_v<typename decltype(t)::type, float>) {
      if (p.weight_dtype == p.dtype) return by_shape(t, t);
    }
    by_shape(t, CppType<DType::kFP32>{});
  });
}

}  // namespace pyllm::norm
