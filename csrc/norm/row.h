// How rows are spread over threads, CTAs and clusters: host side, torch-free. The macros are the tuning knobs; override with -D.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "common/params.h"

// 1: a CTA that walks several rows loads the next one into registers before it reduces the current one.
#ifndef PYLLM_NORM_PREFETCH
#define PYLLM_NORM_PREFETCH 1
#endif
// Vectors per thread of rows of 129 .. 1024 vectors (bf16: N = 1032 .. 8192): 2 or 4.
#ifndef PYLLM_NORM_VECTORS
#define PYLLM_NORM_VECTORS 2
#endif
// CTAs of 512 threads that must fit an SM: 2 caps a thread at 64 registers, 3 at 40.
#ifndef PYLLM_NORM_MIN_CTAS
#define PYLLM_NORM_MIN_CTAS 2
#endif
// Rows a CTA (a warp, where a warp owns a row) walks. 0: as many as one wave of resident CTAs needs, which balances prefetch and tail.
#ifndef PYLLM_NORM_ROWS_PER_CTA
#define PYLLM_NORM_ROWS_PER_CTA 0
#endif
// CTAs that share one row when few long rows leave most SMs idle: one SM moves about 64 bytes per clock, so a row of 8192 with residual
// (32 KB in, 32 KB out) costs it over half a microsecond. 1, 2, 4 or 8.
#ifndef PYLLM_NORM_CLUSTER
#define PYLLM_NORM_CLUSTER 4
#endif
// Shortest row, in bytes, that is worth a cluster barrier (about 0.15 us).
#ifndef PYLLM_NORM_CLUSTER_BYTES
#define PYLLM_NORM_CLUSTER_BYTES 16384
#endif
// 1: st.global.cs (evict first) for outputs.
#ifndef PYLLM_NORM_STREAM_STORES
#define PYLLM_NORM_STREAM_STORES 0
#endif

namespace pyllm::norm {

inline constexpr bool kPrefetch = PYLLM_NORM_PREFETCH != 0;
inline constexpr bool kStreamStores = PYLLM_NORM_STREAM_STORES != 0;
inline constexpr int kWarpsPerCta = 8;  // rows of one warp each: 8 of them make a CTA

// What a kernel needs to know of its launch.
struct RowPlan {
  int threads;        // that own one row, a multiple of 32
  int cluster_log2;   // CTAs that share one row, a power of two
  unsigned row_step;  // from one row of a thread to its next: rows that the grid holds at a time
  float inv_n;        // 1 / row length
};

// The shapes a kernel is instantiated for: vectors per thread.
enum class Shape : int {
  kTwo,
  kFour,
  kEight,  // fp32 rows beyond 16384
};

inline constexpr int kMaxThreads = 512;  // per CTA: a thread may use 128 registers. A row of up to 1024 threads is a cluster of two.

struct RowThreadsChoice {
  Shape shape;
  int threads;
};

// A function of the row length (in 16-byte vectors) alone: this fixes the order of every reduction.
inline RowThreadsChoice choose_threads(int vectors) {
  const auto threads = [&](int per_thread) {
    const int exact = (vectors + per_thread - 1) / per_thread;
    const int multiple = exact > kMaxThreads ? 64 : 32;
    return (exact + multiple - 1) / multiple * multiple;
  };
  if (vectors <= 64) return {Shape::kTwo, 32};
  if (vectors <= 128) return {Shape::kFour, 32};
  if (vectors <= 1024 && PYLLM_NORM_VECTORS == 2) return {Shape::kTwo, threads(2)};
  if (vectors <= 4096) return {Shape::kFour, threads(4)};
  return {Shape::kEight, threads(8)};
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

// Few long rows: a cluster per row. Few rows: one per CTA. Many rows: one wave of resident CTAs that walk them.
template <class Kernel>
Grid plan_grid(Kernel kernel, int64_t rows, int n, int item_size, int threads) {
  const int sms = sm_count();
  int split = threads > kMaxThreads ? 2 : 1;
  if (n * item_size >= PYLLM_NORM_CLUSTER_BYTES) {
    for (int wider = PYLLM_NORM_CLUSTER; wider > split; wider /= 2) {
      if (threads % (32 * wider) == 0 && rows * wider <= sms / 2) split = wider;
    }
  }
  const int per_cta = threads > 32 ? 1 : static_cast<int>(std::clamp<int64_t>((rows + sms - 1) / sms, 1, kWarpsPerCta));
  const dim3 block(threads / split, per_cta);
  const int64_t full = (rows + per_cta - 1) / per_cta;
  int64_t wave = full;
  if (full * split > sms) {
    if constexpr (constexpr int kWalk = PYLLM_NORM_ROWS_PER_CTA; kWalk > 0) {
      wave = (full + kWalk - 1) / std::max(kWalk, 1);
    } else {
      int resident = 0;
      check_launch(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, block.x * block.y, 0), "norm");
      wave = std::min<int64_t>(full, static_cast<int64_t>(std::max(resident, 1)) * sms / split);
    }
  }
  const auto rows_at_once = static_cast<unsigned>(std::max<int64_t>(wave, 1));
  return {rows_at_once * split, block, split, {threads, split == 8 ? 3 : split / 2, rows_at_once * per_cta, 1.f / static_cast<float>(n)}};
}

}  // namespace pyllm::norm
