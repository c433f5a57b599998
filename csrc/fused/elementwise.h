// How element-wise kernels share their work out: host side, torch-free.
#pragma once
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <stdexcept>

#include "common/params.h"

namespace pyllm::fused {

// Threads of a CTA, and 16-byte vectors of output per thread, of inputs that fill the GPU more than once. Measured on an H200 as the
// share of a copy of the same bytes, bf16, 8192 x 4096 (softcap 256 x 128256): act 99 to 100 %, softcap 100 %; with 4 vectors 96 % and
// 98 %, with 256 threads of 4 vectors 97 % and 98 %.
inline constexpr int kThreads = 512;
inline constexpr int kVectors = 2;
// Threads of a CTA of smaller inputs (one vector per thread): few, so that one row reaches many SMs.
inline constexpr int kSmallThreads = 128;

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

// Splits an index i < 2^31 into row and column: row = ((i * magic) >> 32) >> shift. With 2^shift < width <= 2^(shift + 1) and
// magic = ceil(2^(32 + shift) / width) = (2^(32 + shift) + e) / width, e < width, the error i * e < 2^31 * 2^(shift + 1) stays below
// 2^(32 + shift): exact.
struct RowSplit {
  uint32_t magic;  // 0: a row is one item
  uint32_t shift;
  uint32_t width;  // items of one row
};

inline RowSplit row_split(int64_t width) {
  if (width < 1 || width > INT32_MAX)
    throw std::runtime_error("row_split: rows of " + std::to_string(width) + " items, expected 1 to 2^31 - 1");
  if (width == 1) return {0, 0, 1};
  const auto shift = static_cast<uint32_t>(std::bit_width(static_cast<uint64_t>(width - 1)) - 1);
  const uint64_t magic = ((uint64_t{1} << (32 + shift)) + width - 1) / width;
  return {static_cast<uint32_t>(magic), shift, static_cast<uint32_t>(width)};
}

// Items of one launch at most: indices of 32 bits, with room for the threads behind the last item.
inline constexpr int64_t kLaunchItems = int64_t{1} << 30;

// f(first row, rows) for pieces of the rows that one launch can take; `multiple` rows (or the last ones) at a time.
template <class F>
void in_launches(const char* op, int64_t rows, int64_t items, F&& f, int64_t multiple = 1) {
  const int64_t step = items == 0 ? rows : kLaunchItems / items / multiple * multiple;
  if (step == 0 && rows > 0) {
    throw std::runtime_error(std::string(op) + ": a row has " + std::to_string(items) + " items, expected at most " +
                             std::to_string(kLaunchItems / multiple));
  }
  for (int64_t first = 0; first < rows; first += step) f(first, std::min(step, rows - first));
}

// More than one vector for each of the 2048 threads of every SM: several per thread then keep more bytes in flight at no cost in SMs.
inline bool is_large(int64_t total_vectors) { return total_vectors > static_cast<int64_t>(sm_count()) * 2048; }

inline unsigned ctas(int64_t items, int items_per_cta) { return static_cast<unsigned>((items + items_per_cta - 1) / items_per_cta); }

}  // namespace pyllm::fused
