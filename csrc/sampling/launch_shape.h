// How many CTAs share a row. The results do not depend on it (integer sums, exact order), so it follows the batch: a few rows want many
// SMs each; from 133 rows on each has one CTA, two of which share an SM, so that 256 rows are one wave without exchanges. Where a row is
// read several times, halves of rows in two waves are faster: more of the rows in progress fits shared memory and L2, and the rows that
// top-p rejects do not wait for one SM each. 256 rows of 128256, us, with 1 and 2 CTAs: top-p bf16 71, 60 and fp32 98, 80; plain fp32 60,
// 54; token_logprobs fp32 60, 57; but plain bf16 33, 36 and top-k bf16 25, 31. Four: slower everywhere.
#pragma once
#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "sampling/row.cuh"

namespace pyllm::sampling {

constexpr int kRowThreads = 512;
constexpr int64_t kSms = 132;
constexpr int64_t kResident = 2 * kSms;  // CTAs of 512 threads with 64 registers and half of the shared memory each
constexpr int64_t kFewTokens = 4096;     // tokens per CTA that justify doubling the cluster
constexpr int kMaxCtas = 16;
constexpr int64_t kWholeSm = 227 * 1024, kHalfSm = 113 * 1024;
constexpr int64_t kHeldStep = 512 * kRowThreads / 32;  // a chunk for each warp

struct Spread {
  int cluster;
  int64_t slice;  // tokens per CTA, a multiple of 8
  int64_t held;   // tokens in shared memory, a multiple of kHeldStep
  int64_t tops;   // bytes for Row::tops behind them
};

inline Spread spread_row(int64_t rows, int64_t vocab, int64_t item_size, int64_t work_bytes, bool rereads) {
  int cluster = 1;
  while (cluster < kMaxCtas && rows * cluster * 2 <= kResident && vocab > cluster * kFewTokens) cluster *= 2;
  if (rereads && cluster == 1 && rows <= kResident && vocab > kFewTokens) cluster = 2;
  const int64_t slice = ((vocab + cluster - 1) / cluster + 7) / 8 * 8;
  const int64_t chunks = (slice + kHeldStep - 1) / kHeldStep, tops = chunks <= kMaxTops ? chunks * kRowThreads * 2 : 0;
  const int64_t room = (rows * cluster <= kSms ? kWholeSm : kHalfSm) - work_bytes - tops;
  const int64_t steps = std::min((slice + kHeldStep - 1) / kHeldStep, room / item_size / kHeldStep);
  return {cluster, slice, steps * kHeldStep, tops};
}

inline LaunchShape shape_of(const Spread& spread, int64_t rows, int64_t item_size, int64_t work_bytes) {
  return {.grid = dim3(static_cast<unsigned>(rows * spread.cluster)),
          .block = dim3(kRowThreads),
          .smem = static_cast<size_t>(work_bytes + spread.held * item_size + spread.tops),
          .cluster = spread.cluster};
}

}  // namespace pyllm::sampling
