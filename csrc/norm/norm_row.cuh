// The kernel behind rms_norm and layer_norm, parameterised by a formula:
//   h = residual ? round(x + residual) : x       (written back to residual)
//   y = formula(h) in fp32, stored once: as dtype, or as e4m3_rn_sat(y * (1 / scale)) with a given scale or one per row.
//
// Layout: rows as in row.cuh, held in registers from the load to the store: x and residual are read once, out and residual written
// once. A CTA takes one row and leaves: with many CTAs per SM some load while others reduce and store, and the hardware deals out the
// rows, so no SM ends early.
// Limits: n a multiple of 8 up to 32768; x, residual, weight and bias 16-byte aligned, row strides too.
#pragma once
#include "common/dispatch.h"
#include "norm/norm_row.h"
#include "norm/row.cuh"

namespace pyllm::norm {

enum class NormOp { kRms, kLayer };

// Logical threads per thread where there are many rows. With a residual, 2 spill where a product per element is kept (rms_norm with a
// scale per row: 8 bytes; with 1 it runs at 98.9 % of a copy) and lose where there are two barriers (layer_norm: 95.6 % instead of 96.6).
constexpr int choose_fold(NormOp op, NormQuant quant, bool residual) {
  return residual && (op == NormOp::kLayer || quant == NormQuant::kToken) ? 1 : kFold;
}

template <NormOp Op, class T_, class W_, class Layout_, bool Residual, NormQuant Quant>
struct NormConfig {
  using T = T_;
  using W = W_;
  using Layout = Layout_;
  static constexpr bool kResidual = Residual;
  static constexpr NormQuant kQuant = Quant;
  static constexpr int kUnit = Layout::kUnit, kFold = Layout::kFold, kVectors = Layout::kVectors, kV = kVec<T>;
  static constexpr int kWords = kV * static_cast<int>(sizeof(W)) / 16;  // 16-byte loads of weights per vector
  // Products h * weight stay in registers between the maximum and the store, instead of a second read of the weights: with the loads of
  // weights no longer behind branches, 101.9 % of a copy instead of 86.7 %.
  static constexpr bool kKeepProducts = Op == NormOp::kRms && Quant == NormQuant::kToken && sizeof(T) == 2 && kVectors <= 4;
  // A residual, or the products of a scale per row, take as many registers again as the row. rms_norm without either does with 24 to
  // spare: 40 in all, 6 CTAs of 256 threads per SM instead of 5 (fp16 would spill 8 bytes).
  static constexpr bool kLean =
      Op == NormOp::kRms && kVectors == 4 && !Residual && Quant != NormQuant::kToken && !std::is_same_v<T, __half>;
  // Vectors behind a branch each, so that ptxas does not load the columns of all of them at once: two sets of wide columns, or a second
  // pass over them, would spill 8 to 72 bytes.
  static constexpr bool kOneByOne = Op == NormOp::kLayer && (Quant == NormQuant::kToken || sizeof(W) == 4);
  // Few rows keep weight and bias in registers; in fp32 beside two-byte rows they would spill 8 to 24 bytes with 64 of them.
  static constexpr bool kWideColumns = Op == NormOp::kLayer && !Layout::kMany && sizeof(W) > sizeof(T);
  static constexpr int kMinCtas = kLean          ? Layout::min_ctas(kVectors, 24)
                                  : kWideColumns ? 1
                                                 : Layout::min_ctas(kVectors * (1 + (Residual || kKeepProducts)));
  // Columns live in registers ahead of the wait, off the critical path of a single row; 8 vectors of them would not fit.
  static constexpr bool kKeepColumns = !Layout::kMany && kVectors * kWords <= 4;
};

// Columns of weight or bias. Their way from DRAM starts ahead of pdl_wait(): into registers, or for the first row's CTA into L2.
template <class C>
struct Columns {
  const char* base;
  uint4 kept[C::kKeepColumns ? C::kVectors * C::kWords : 1];

  __device__ __forceinline__ Columns(const void* p, const RowThreads<C::kVectors>& threads, int vectors)
      : base(static_cast<const char*>(p)) {
#pragma unroll
    for (int j = 0; j < C::kVectors; ++j) {
      const bool ok = base != nullptr && threads.vector(j) < vectors;
      if constexpr (C::kKeepColumns) {
#pragma unroll
        for (int i = 0; i < C::kWords; ++i) kept[j * C::kWords + i] = word(threads.vector(j), i, ok);
      } else if (ok && threads.first_row == 0) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(base + static_cast<int64_t>(threads.vector(j)) * C::kWords * 16));
      }
    }
  }
  __device__ __forceinline__ uint4 word(int vector, int i, bool ok) const {
    return load_constant < !C::kKeepColumns && (C::kVectors >= 8) > (base + (static_cast<int64_t>(vector) * C::kWords + i) * 16, ok);
  }
  // Of a vector; zeros where not ok.
  __device__ __forceinline__ void values(int j, int vector, bool ok, float* f) const {
#pragma unroll
    for (int i = 0; i < C::kWords; ++i) {
      unpack<typename C::W>(C::kKeepColumns ? stay_packed(kept[j * C::kWords + i]) : word(vector, i, ok && base != nullptr),
                            f + i * kVec<typename C::W>);
    }
  }
};

// One row in registers, as the formulas see it.
template <class C>
struct Row {
  RowThreads<C::kVectors>& threads;
  int vectors;
  Columns<C> weight;
  Columns<C> bias;
  uint4 h[C::kVectors];

  __device__ __forceinline__ bool has(int j) const { return threads.vector(j) < vectors; }
  __device__ __forceinline__ void values(int j, float* f) const { unpack<typename C::T>(stay_packed(h[j]), f); }
  // The same values by other instructions: ptxas would otherwise keep those of the statistics for the result, twice the registers of h.
  __device__ __forceinline__ void values_again(int j, float* f) const {
    if constexpr (sizeof(typename C::T) == 4) return values(j, f);
    const uint32_t words[4] = {h[j].x, h[j].y, h[j].z, h[j].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<typename C::T, __half>) {
        unpack(__byte_perm(words[i], 0, 0x1032), f[2 * i + 1], f[2 * i], __half{});
      } else {
        f[2 * i] = __uint_as_float(__byte_perm(words[i], 0, 0x1044));
        f[2 * i + 1] = __uint_as_float(__byte_perm(words[i], 0, 0x3244));
      }
    }
  }
  __device__ __forceinline__ void weights(int j, float* f) const { weight.values(j, threads.vector(j), has(j), f); }
  __device__ __forceinline__ void biases(int j, float* f) const { bias.values(j, threads.vector(j), has(j), f); }
};

// h = round(x + other) back into h and residual.
template <class C>
__device__ __forceinline__ void add_residual(Row<C>& a, const uint4* other, typename C::T* residual) {
  using T = typename C::T;
  constexpr int kV = C::kV;
#pragma unroll
  for (int j = 0; j < C::kVectors; ++j) {
    float f[kV], g[kV];
    unpack<T>(a.h[j], f);
    unpack<T>(other[j], g);
#pragma unroll
    for (int i = 0; i < kV; ++i) f[i] += g[i];
    a.h[j] = pack<T>(f);
    store_vector(residual + j * 32 * kV, a.h[j], a.has(j));
  }
}

// Statistics of the row in a.h, then its output. inv: 1 / scale with a given scale.
template <class Formula, class C>
__device__ __forceinline__ void write_result(const NormParams& p, const RowPlan& plan, const Row<C>& a, int64_t row, float inv) {
  constexpr int kV = C::kV;
  const Formula formula(a, plan.inv_n, p.eps);
  if constexpr (C::kQuant == NormQuant::kToken) {
    const float scale = scale_of(formula.absmax);
    if (a.threads.first == 0) p.scale_out[row] = scale;
    inv = inverse_of_dynamic(scale);
  }
  const int64_t to = row * p.n + a.threads.first * kV;
#pragma unroll
  for (int j = 0; j < C::kVectors; ++j) {
    if (C::kOneByOne && !a.has(j)) continue;
    float y[kV];
    formula.result(a, j, y);
    if constexpr (C::kQuant == NormQuant::kNone) {
      store_vector(static_cast<typename C::T*>(p.out) + to + j * 32 * kV, pack<typename C::T>(y), a.has(j));
    } else {
      store_e4m3<kV>(static_cast<uint8_t*>(p.out) + to + j * 32 * kV, y, inv, a.has(j));
    }
  }
}

template <class Formula, class C>
__global__ void __launch_bounds__(C::Layout::kCtaThreads, C::kMinCtas)
    norm_kernel(const __grid_constant__ NormParams p, const RowPlan plan) {
  using T = typename C::T;
  constexpr int kV = C::kV, kN = C::kVectors;
  __shared__ RowScratch scratch;

  RowThreads<kN> at(plan, scratch);
  const int vectors = p.n / kV;
  Row<C> a{at, vectors, {p.weight, at, vectors}, {Formula::kBias ? p.bias : nullptr, at, vectors}};
  at.arrive();
  at.wait();
  const int64_t row = at.first_row;
  if (row >= p.rows) return;  // a warp without a row; a CTA always has one

  const T* from = static_cast<const T*>(p.x) + row * p.x_stride + at.first * kV;
  T* residual = static_cast<T*>(p.residual) + row * p.residual_stride + at.first * kV;
  uint4 other[C::kResidual ? kN : 1];
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    a.h[j] = load_vector(from + j * 32 * kV, a.has(j));
    if constexpr (C::kResidual) other[j] = load_vector(residual + j * 32 * kV, a.has(j));
  }
  const float inv = C::kQuant == NormQuant::kStatic ? inverse(*p.scale) : 0.f;  // after the loads: the division waits for the scale
  if constexpr (C::kResidual) add_residual(a, other, residual);
  write_result<Formula>(p, plan, a, row, inv);
}

template <NormOp Op, template <class> class Formula>
void run_norm(const char* name, const NormParams& p, cudaStream_t stream) {
  const auto by_shape = [&](auto t, auto w) {
    using T = typename decltype(t)::type;
    using W = typename decltype(w)::type;
    dispatch_bool(p.residual != nullptr, [&](auto residual) {
      dispatch<0, 1, 2>("quant", static_cast<int>(p.quant), [&](auto quant) {
        constexpr bool kResidual = decltype(residual)::value;
        constexpr auto kQuant = static_cast<NormQuant>(decltype(quant)::value);
        with_layout<sizeof(T) == 4 ? 8 : 4, choose_fold(Op, kQuant, kResidual)>(
            p.rows, p.n, sizeof(T), [&]<class Layout>(Layout, const Grid& g) {
              using C = NormConfig<Op, T, W, Layout, kResidual, kQuant>;
              launch(name, {.grid = dim3(g.grid), .block = g.block, .cluster = g.cluster}, stream, &norm_kernel<Formula<C>, C>, p, g.plan);
            });
      });
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
