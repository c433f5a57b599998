// How many CTAs share a row. The results do not depend on it (integer sums, exact order), so it follows the batch: a few rows want many
// SMs each, many rows want fewer barriers and less idle memory time.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/launch.h"

namespace pyllm::sampling {

constexpr int64_t kFewRows = 8;        // up to here a row is spread as widely as it goes (8 rows x 16 CTAs fill 132 SMs)
constexpr int64_t kFewTokens = 4096;   // few rows: tokens per CTA that justify doubling the cluster
constexpr int64_t kManyBytes = 32208;  // many rows: bytes per CTA that justify it; with 25136 of Work, 4 CTAs of 256 threads share an SM
constexpr int kManyCluster = 8;        // many rows: 16 CTAs would need a whole GPC for one row
constexpr int kMaxCtas = 16;
constexpr int64_t kMaxSlice = 65536;  // the 16-bit halves of a histogram overflow beyond
constexpr int64_t kSharedMemory = 227 * 1024;

struct Spread {
  int threads;
  int cluster;
  int64_t slice;  // tokens per CTA, a multiple of 8
  int64_t held;   // of them in shared memory, a multiple of 8
};

inline Spread spread_row(int64_t rows, int64_t vocab, int64_t item_size, int64_t work_bytes) {
  const bool few = rows <= kFewRows;
  const int64_t wanted = few ? kFewTokens : kManyBytes / item_size;
  const int64_t room = (kSharedMemory - work_bytes) / item_size / 8 * 8;
  const auto slice_of = [&](int ctas) { return ((vocab + ctas - 1) / ctas + 7) / 8 * 8; };
  int cluster = 1;
  while (cluster < (few ? kMaxCtas : kManyCluster) && slice_of(cluster) > wanted) cluster *= 2;
  while (cluster < kMaxCtas && slice_of(cluster) > std::min(room, kMaxSlice)) cluster *= 2;
  const int64_t slice = slice_of(cluster);
  return {few || slice * item_size > kManyBytes ? 512 : 256, cluster, slice, std::min(slice, room)};
}

inline LaunchShape shape_of(const Spread& spread, int64_t rows, int64_t item_size, int64_t work_bytes) {
  return {.grid = dim3(static_cast<unsigned>(rows * spread.cluster)),
          .block = dim3(spread.threads),
          .smem = static_cast<size_t>(work_bytes + spread.held * item_size),
          .cluster = spread.cluster};
}

}  // namespace pyllm::sampling
