// Which tile of the dense GEMM serves a shape: measured exceptions, and a model of the time for all else. Host code.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pyllm::dense {

struct TileInfo {
  bool turns;  // Way::kTurns
  int bm, bn, split;
};

struct Problem {
  int64_t m, n, k;
  int bytes;  // of an element
  int sms;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// CTAs of one wave. The GPCs of an H200 have 16 or 18 SMs: 30 clusters of 4 fit, not 33.
inline int64_t slots(const TileInfo& t, int sms) { return t.split <= 2 ? sms / t.split * t.split : (sms / t.split - 3) * t.split; }

inline int64_t tiles(const TileInfo& t, const Problem& p) { return ceil_div(p.m, t.bm) * ceil_div(p.n, t.bn); }

// Clocks. A step is 128 bytes of K: the time of the tensor cores, or of shared memory (operands are read once per 64 rows, and TMA writes
// them), whichever is longer. The constants are fitted to 144 measured shapes of up to 14 tiles each, M = 256 to 8192: the tile with the
// least model time took 0.2 % longer than the fastest one on average, 5 % at most.
inline double model_time(const TileInfo& t, const Problem& p) {
  const double tensor = t.bm * t.bn * (128.0 / p.bytes) / (p.bytes == 2 ? 2048 : 4096);
  const double shared = 0.641 * (t.bm / 64 * (64.0 + t.bn) + t.bm + t.bn);
  const double steps = static_cast<double>(ceil_div(p.k * p.bytes, 128)) / t.split;
  const double waves = static_cast<double>(ceil_div(tiles(t, p) * t.split, slots(t, p.sms)));
  // In turns the stores of a tile hide behind the products of the next.
  const double around = t.turns ? 6790 + 130 * waves : 4395 * waves;
  const double join = t.split == 1 ? 0 : t.split == 2 ? 2000 : 4000;
  return waves * (std::max(tensor, shared) + 17) * steps + around + join;
}

// What was measured faster than the model's choice by more than 2 %: for m of the same number of 128-row tiles.
struct Exception {
  int bytes, m, n, k;
  TileInfo tile;
};
inline constexpr Exception kExceptions[] = {
    {1, 512, 8192, 1024, {true, 128, 128, 1}},
    {1, 512, 8192, 3584, {true, 128, 128, 1}},
    {2, 4096, 6144, 4096, {false, 128, 256, 1}},
};

inline bool is_tile(const TileInfo& a, const TileInfo& b) {
  return a.turns == b.turns && a.bm == b.bm && a.bn == b.bn && a.split == b.split;
}

// Index of the tile to take. Fewer rows than were measured take the tile of the fewest that were: their CTAs are a part of those, so they
// need no longer (narrower tiles, which the model would take, do: 15.9 us for 64 x 6144 x 4096 in e4m3 against 12.5 us for 256 rows).
inline int choose_tile(const TileInfo* all, int count, Problem p) {
  p.m = std::max<int64_t>(p.m, 256);
  for (const Exception& e : kExceptions) {
    if (e.bytes != p.bytes || e.n != p.n || e.k != p.k || ceil_div(e.m, 128) != ceil_div(p.m, 128)) continue;
    for (int i = 0; i < count; ++i) {
      if (is_tile(all[i], e.tile)) return i;
    }
  }
  int best = -1;
  double least = 0;
  for (int i = 0; i < count; ++i) {
    // A part of a split has 8 steps at least.
    if (all[i].split > 1 && ceil_div(p.k * p.bytes, 128) < 8 * all[i].split) continue;
    const double time = model_time(all[i], p);
    if (best < 0 || time < least) {
      best = i;
      least = time;
    }
  }
  return best;
}

inline constexpr int kFewRows = 64;

// Up to kFewRows rows of x, with tiles of 64 rows (dense_few.cuh): microseconds beyond what all tiles take. The longer of the stream of w
// and of what one SM takes of it, 0.42 of the other, and what a join and a second wave cost. Fitted to 32 shapes of 32 and 64 rows, e4m3
// and bf16, with 12 tiles each; what it misses of 34 (N, K) by more than 2 % is in the table.
inline double few_time(const TileInfo& t, const Problem& p) {
  constexpr int kStep = 256;  // bytes of K
  const double steps = static_cast<double>(ceil_div(p.k * p.bytes, kStep)) / t.split;
  const int64_t waves = ceil_div(ceil_div(p.n, t.bn) * t.split, slots(t, p.sms));
  const double one_sm = static_cast<double>(waves) * t.bn * kStep * steps / 0.093e6;
  const double stream = static_cast<double>(p.n * p.k * p.bytes) / 4.6e6;
  const double join = t.split == 1 ? 0 : t.split == 2 ? 0.43 : 0.8;
  return std::max(stream, one_sm) + 0.42 * std::min(stream, one_sm) + join + 1.8 * static_cast<double>(waves - 1);
}

// For any number of few rows.
inline constexpr Exception kFewExceptions[] = {
    {1, kFewRows, 3072, 2048, {false, 64, 96, 2}},    {1, kFewRows, 8192, 1024, {false, 64, 128, 1}},
    {1, kFewRows, 5120, 5120, {false, 64, 96, 2}},    {1, kFewRows, 24576, 4096, {false, 64, 64, 1}},
    {1, kFewRows, 128256, 4096, {false, 64, 128, 1}}, {2, kFewRows, 7168, 8192, {false, 64, 112, 2}},
    {2, kFewRows, 24576, 4096, {false, 64, 64, 1}},   {2, kFewRows, 128256, 4096, {false, 64, 128, 1}},
    {2, kFewRows, 4096, 1024, {false, 64, 128, 2}},
};

inline int choose_few(const TileInfo* all, int count, const Problem& p) {
  for (const Exception& e : kFewExceptions) {
    if (e.bytes != p.bytes || e.n != p.n || e.k != p.k) continue;
    for (int i = 0; i < count; ++i) {
      if (is_tile(all[i], e.tile)) return i;
    }
  }
  int best = -1;
  for (int i = 0; i < count; ++i) {
    if (all[i].split > 1 && ceil_div(p.k * p.bytes, 128) < 8 * all[i].split) continue;  // a part has 8 steps at least
    if (best < 0 || few_time(all[i], p) < few_time(all[best], p)) best = i;
  }
  return best;
}

// Tiles along M of one group of the walk: what is in flight then spans about as many rows of x as of w.
inline int raster(const TileInfo& t) { return std::max(1, 1024 / t.bm); }

}  // namespace pyllm::dense
