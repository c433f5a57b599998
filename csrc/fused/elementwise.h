// How element-wise kernels share their work out: host side, torch-free. The macros are the tuning knobs; override with -D.
#pragma once
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>

#include "common/params.h"

// Threads of a CTA, and 16-byte vectors of output per thread, of inputs that fill the GPU more than once.
#ifndef PYLLM_FUSED_THREADS
#define PYLLM_FUSED_THREADS 256
#endif
#ifndef PYLLM_ACT_VECTORS
#define PYLLM_ACT_VECTORS 4
#endif
#ifndef PYLLM_ACT_MUL_VECTORS
#define PYLLM_ACT_MUL_VECTORS 2
#endif
#ifndef PYLLM_EMBED_VECTORS
#define PYLLM_EMBED_VECTORS 4
#endif
// Threads of a CTA of smaller inputs (one vector per thread): few, so that one row reaches many SMs.
#ifndef PYLLM_FUSED_SMALL_THREADS
#define PYLLM_FUSED_SMALL_THREADS 128
#endif
// 1: ld.global.cs (evict first) for inputs, which nobody reads again.
#ifndef PYLLM_FUSED_STREAM_LOADS
#define PYLLM_FUSED_STREAM_LOADS 1
#endif
// 1: st.global.cs for outputs, which the next kernel does read: worth it only for outputs far larger than L2.
#ifndef PYLLM_FUSED_STREAM_STORES
#define PYLLM_FUSED_STREAM_STORES 0
#endif

namespace pyllm::fused {

inline constexpr int kThreads = PYLLM_FUSED_THREADS;
inline constexpr int kSmallThreads = PYLLM_FUSED_SMALL_THREADS;

// SMs of the current device, asked once per device.
inline int sm_count() {
  static std::atomic<int> counts[64];
  int device = 0;
  check_launch(cudaGetDevice(&device), "sm_count");
  std::atomic<int>& cached = counts[device % 64];
  int count = cached.load(std::memory_order_relaxed);
  if (count == 0) {
    check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "sm_count");
    cached.store(count, std::memory_order_relaxed);
  }
  return count;
}

// Splits a flat vector index into row and column by one multiplication: row = (i * magic) >> 64 is exact while total * vectors < 2^64.
struct RowSplit {
  uint64_t magic;   // floor((2^64 - 1) / vectors) + 1; 0: a row is one vector; 1: everything is one row
  int64_t vectors;  // 16-byte vectors of one row
};

// A matrix of dense rows; rows that lie end to end count as one, which saves the division.
struct FlatPlan {
  int64_t total;  // 16-byte vectors of all rows
  RowSplit split;
};

inline FlatPlan flat_plan(int64_t rows, int64_t vectors, bool end_to_end) {
  const int64_t total = rows * vectors;
  if (rows <= 1 || end_to_end) return {total, {1, total}};
  if (static_cast<unsigned __int128>(total) * static_cast<unsigned __int128>(vectors) >> 64 != 0) {
    throw std::runtime_error("flat_plan: " + std::to_string(rows) + " rows of " + std::to_string(vectors) +
                             " vectors are too many for one launch");
  }
  return {total, {vectors == 1 ? 0 : UINT64_MAX / static_cast<uint64_t>(vectors) + 1, vectors}};
}

// More than one vector for each of the 2048 threads of every SM: several per thread then keep more bytes in flight at no cost in SMs.
inline bool is_large(int64_t total_vectors) { return total_vectors > static_cast<int64_t>(sm_count()) * 2048; }

inline unsigned ctas(int64_t total_vectors, int vectors_per_cta) {
  const int64_t count = (total_vectors + vectors_per_cta - 1) / vectors_per_cta;
  if (count > INT32_MAX) throw std::runtime_error("fused: " + std::to_string(total_vectors) + " vectors are too many for one launch");
  return static_cast<unsigned>(count);
}

}  // namespace pyllm::fused
