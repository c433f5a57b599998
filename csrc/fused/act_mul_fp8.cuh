// act_mul_fp8: y = round(f(gate) * up), scale = max(absmax(y) / 448, 1e-10) of each row, q = e4m3(y * (1 / scale)): to the bit what act_mul
// and quantize_fp8 give one after the other, in one launch and without y in memory. NaN does not count as a maximum and becomes NaN.
// Or with one given scale for all rows.
//
// Layout: a row per CTA or cluster, its y in registers (rounded, two to a register) from the loads to the stores; the maximum over the
// row is one barrier, or one exchange in the cluster (norm/row.cuh). A maximum has no order, so the split is free: few rows take up to
// eight CTAs each, because two exponentials and two reciprocals an element make one SM slow (14336 elements: 1800 clocks).
// 2 * T * F elements are read, T * F bytes written. Limits: F a multiple of 8 up to 32768; x and its row stride 16-byte aligned.
#pragma once
#include "fused/act_mul_fp8.h"
#include "fused/activations.cuh"
#include "norm/quantize_fp8.cuh"

namespace pyllm::fused {

inline constexpr int kMaxRowThreads = 512;  // of a CTA

template <class T, int Vectors, class F>
__global__ void __launch_bounds__(kMaxRowThreads) act_mul_fp8_kernel(const __grid_constant__ ActMulFp8Params p, const norm::RowPlan plan) {
  constexpr int kV = norm::kVec<T>;
  __shared__ norm::RowScratch scratch;
  norm::RowThreads<Vectors> at(plan, scratch);
  const int64_t row = at.first_row;
  const T* const from = static_cast<const T*>(p.x) + row * p.x_stride + at.first * kV;
  at.arrive();
  at.wait();

  uint4 gate[Vectors], up[Vectors];
#pragma unroll
  for (int j = 0; j < Vectors; ++j) {
    const bool ok = at.vector(j) * kV < p.n;
    gate[j] = norm::load_vector(from + j * 32 * kV, ok);
    up[j] = norm::load_vector(from + p.n + j * 32 * kV, ok);
  }
#pragma unroll
  for (int j = 0; j < Vectors; ++j) {
    float g[kV], u[kV];
    norm::unpack<T>(gate[j], g);
    norm::unpack<T>(up[j], u);
#pragma unroll
    for (int i = 0; i < kV; ++i) g[i] = F{}(g[i]) * u[i];
    gate[j] = norm::pack<T>(g);
  }
  float scale;
  if (p.scale != nullptr) {
    scale = *p.scale;
  } else {
    scale = norm::scale_of(at.reduce(norm::absmax_of<T, Vectors>(gate), MaxOp{}));
    if (at.first == 0) p.scale_out[row] = scale;
  }
  const float inv = norm::inverse(scale);
  uint8_t* const out = p.out + row * p.n + at.first * kV;
#pragma unroll
  for (int j = 0; j < Vectors; ++j) {
    float y[kV];
    norm::unpack<T>(gate[j], y);
    norm::store_e4m3<kV>(out + j * 32 * kV, y, inv, at.vector(j) * kV < p.n);
  }
}

struct RowShare {
  int vectors;  // of a thread
  int warps;    // of a row, a multiple of cluster
  int cluster;  // CTAs of a row
};

// Many rows: four vectors a thread, so that a row of 14336 is one CTA. Fewer: two, and the more CTAs a row the fewer rows there are.
inline RowShare share_row(int64_t rows, int vectors, int sms, bool clusters) {
  constexpr int kCtaWarps = kMaxRowThreads / 32, kMost = 8;
  const int widest = clusters ? 32 : kCtaWarps;  // warps of a row: RowScratch has 32 slots
  const auto warps_of = [&](int each) { return (vectors + 32 * each - 1) / (32 * each); };
  int each = rows > sms && vectors > 64 ? 4 : 2;
  while (warps_of(each) > widest) each *= 2;
  int warps = warps_of(each), cluster = warps > kCtaWarps ? 2 : 1;
  while (clusters && cluster < kMost && warps >= 4 * cluster && 2 * rows * cluster <= sms) cluster *= 2;
  warps = (warps + cluster - 1) / cluster * cluster;
  return {each, warps, cluster};
}

template <class T, int Kind>
void launch_act_mul_fp8(const ActMulFp8Params& p, cudaStream_t stream) {
  using F = Act<Kind, sizeof(T) == 4>;
  const RowShare s = share_row(p.rows, p.n / norm::kVec<T>, norm::sm_count(), device_architecture() >= 90);
  const norm::RowPlan plan{s.warps * 32, static_cast<int>(norm::ceil_log2(s.cluster)), 0, 0.f};
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(p.rows) * s.cluster), .block = dim3(s.warps / s.cluster * 32), .cluster = s.cluster};
  const auto start = [&](auto* kernel) { launch("act_mul_fp8", shape, stream, kernel, p, plan); };
  if (s.vectors == 2) return start(&act_mul_fp8_kernel<T, 2, F>);
  if (s.vectors == 4) return start(&act_mul_fp8_kernel<T, 4, F>);
  if constexpr (sizeof(T) == 4) {
    if (s.vectors == 8) return start(&act_mul_fp8_kernel<T, 8, F>);
  }
  throw std::runtime_error("act_mul_fp8: rows of " + std::to_string(p.n) + " elements take two CTAs, which need a GPU of sm_90");
}

}  // namespace pyllm::fused
