// How rows are spread over threads, CTAs and clusters: host side, torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/device.h"
#include "common/params.h"

namespace pyllm::norm {

// Logical threads whose vectors one thread holds where there are many rows (below). With 2, norms of 8192 rows of 4096 bf16 took
// up to 8 % less time on an H200 than with 1 or 4: fewer threads per barrier than with 1, more rows in flight than with 4. Norms whose
// registers are short take 1 (norm_row.cuh).
inline constexpr int kFold = 2;
// CTAs that share one row when few long rows leave most SMs idle: one SM moves about 64 bytes per clock, so a row of 8192 with residual
// (32 KB in, 32 KB out) costs it over half a microsecond.
inline constexpr int kClusterCtas = 4;
inline constexpr int kClusterBytes = 16384;  // shortest row that is worth a cluster barrier (about 0.15 us)
inline constexpr int kManyRows = 4;          // per SM: more rows take the layout for throughput
inline constexpr int kWarpsPerCta = 8;       // rows of one warp each: up to 8 of them make a CTA
inline constexpr int kMaxThreads = 512;      // per CTA. A row of up to 1024 threads is a cluster of two.

// What a kernel needs to know of its launch.
struct RowPlan {
  int threads;        // that hold one row, a multiple of 32
  int cluster_log2;   // CTAs that share one row, a power of two
  unsigned row_step;  // rows that the grid holds at a time; a kernel that takes every row at once ignores it
  float inv_n;        // 1 / row length
};

// How a thread holds its part of a row. The order of a sum is that of the logical threads, `unit` vectors each: a thread that holds `fold`
// of them (fold * unit vectors) keeps their sums apart, so the bits do not depend on fold.
template <int Unit, int Fold, bool Many>
struct RowLayout {
  static constexpr int kUnit = Unit, kFold = Fold, kVectors = Unit * Fold;
  // Many rows: throughput counts. As many CTAs as fit, each with its row in flight; constants come from L1.
  // Few rows: latency counts. A row has as many threads as possible, and constants are in registers before the row arrives.
  static constexpr bool kMany = Many;
  static constexpr int kCtaThreads = Unit == 2 ? kMaxThreads / Fold : kMaxThreads;
  // CTAs that must fit an SM when a thread has `data` vectors in flight.
  // spare: registers beyond the vectors; 8 results at a time spill with less than 48.
  static constexpr int min_ctas(int data, int spare = kVectors == 8 ? 48 : 32) {
    if (!Many) return kVectors == 2 ? 2 : 1;
    const int registers = (spare + 4 * data + 7) / 8 * 8;
    return std::max(65536 / (registers * kCtaThreads), 1);
  }
};

struct RowChoice {
  int unit;     // vectors of a logical thread: 2, 4, or 8 (fp32 rows beyond 16384)
  int logical;  // threads
};

// A function of the row length (in 16-byte vectors) alone: this fixes the order of every reduction.
inline RowChoice choose_threads(int vectors) {
  const auto threads = [&](int unit) {
    const int exact = (vectors + unit - 1) / unit;
    const int multiple = exact > kMaxThreads ? 64 : 32;
    return (exact + multiple - 1) / multiple * multiple;
  };
  if (vectors <= 64) return {2, 32};
  if (vectors <= 128) return {4, 32};
  if (vectors <= 1024) return {2, threads(2)};
  if (vectors <= 4096) return {4, threads(4)};
  return {8, threads(8)};
}

inline int sm_count() {
  int device = 0, count = 0;
  check_launch(cudaGetDevice(&device), "norm");
  check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "norm");
  return count;
}

struct Grid {
  unsigned grid;
  dim3 block;
  int cluster;
  RowPlan plan;
};

inline unsigned ceil_log2(int x) {
  unsigned log2 = 0;
  while (1 << log2 < x) ++log2;
  return log2;
}

// Rows of one warp share a CTA, any other row is a CTA, or a cluster of CTAs where few long rows leave most SMs idle.
inline Grid plan_grid(int64_t rows, int n, int item_size, int threads, int max_threads, int sms) {
  int split = threads > kMaxThreads ? 2 : 1;
  const bool clusters = device_architecture() >= 90;
  if (split > 1 && !clusters) {
    throw std::runtime_error("norm: rows of " + std::to_string(n) + " elements take two CTAs, which need a GPU of sm_90");
  }
  if (clusters && n * item_size >= kClusterBytes) {
    for (int wider = kClusterCtas; wider > split; wider /= 2) {
      if (threads % (32 * wider) == 0 && rows * wider <= sms / 2) split = wider;
    }
  }
  const int per_cta =
      threads > 32 ? 1 : static_cast<int>(std::clamp<int64_t>((rows + sms - 1) / sms, 1, std::min(kWarpsPerCta, max_threads / 32)));
  const auto ctas = static_cast<unsigned>(std::max<int64_t>((rows + per_cta - 1) / per_cta, 1));
  return {ctas * split,
          dim3(threads / split, per_cta),
          split,
          {threads, static_cast<int>(ceil_log2(split)), ctas * per_cta, 1.f / static_cast<float>(n)}};
}

// Calls run(RowLayout, Grid) with the layout for these rows. MaxUnit: the largest unit that T has. Fold: of rows of unit 2.
template <int MaxUnit, int Fold = kFold, class Run>
void with_layout(int64_t rows, int n, int item_size, Run&& run) {
  const auto [unit, logical] = choose_threads(n * item_size / 16);
  const int sms = sm_count();
  const auto take = [&]<class Layout>(Layout layout) {
    const int threads = (logical / 32 + Layout::kFold - 1) / Layout::kFold * 32;
    run(layout, plan_grid(rows, n, item_size, threads, Layout::kCtaThreads, sms));
  };
  const bool many = rows > int64_t{kManyRows} * sms && logical > 32;
  if (unit == 2) return many ? take(RowLayout<2, Fold, true>{}) : take(RowLayout<2, 1, false>{});
  if (unit == 4) return many ? take(RowLayout<4, 2, true>{}) : take(RowLayout<4, 1, false>{});
  if constexpr (MaxUnit == 8) take(RowLayout<8, 1, false>{});
}

}  // namespace pyllm::norm
