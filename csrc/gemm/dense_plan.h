// Which tile of the dense GEMM serves a shape: a table of measured choices where there is one, a model of the time elsewhere. Host code.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pyllm::dense {

enum class Way;

struct TileInfo {
  int way, bm, bn, cluster_m, cluster_n, split, ctas_per_sm;
};

struct Problem {
  int64_t m, n, k;
  int bytes;  // of an element
  int sms;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// CTAs of a cluster size that an H200 holds: GPCs have 16 or 18 SMs, so clusters of 4 and 8 leave some SMs idle.
inline int64_t slots(const TileInfo& t, int sms) {
  const int cluster = t.cluster_m * t.cluster_n * t.split;
  const int64_t clusters = cluster <= 2 ? sms / cluster : sms / cluster - 1;
  return std::max<int64_t>(1, clusters * t.ctas_per_sm);
}

inline int64_t tiles(const TileInfo& t, const Problem& p) {
  return ceil_div(p.m, int64_t{t.bm} * t.cluster_m) * ceil_div(p.n, int64_t{t.bn} * t.cluster_n);
}

// Clocks. A step is 128 bytes of K: the tensor cores' time, the time of shared memory (operands are read once per 64 rows, and TMA writes
// them) or that of the L2, whichever is longest.
inline double model_time(const TileInfo& t, const Problem& p) {
  const double tensor = t.bm * t.bn * (128.0 / p.bytes) / (p.bytes == 2 ? 2048 : 4096);
  const double shared = t.bm / 64 * (64.0 + t.bn) + (t.bm + t.bn);
  const double l2 = (t.bm / t.cluster_n + t.bn / t.cluster_m) * 128.0 / 55;
  const double steps = static_cast<double>(ceil_div(p.k * p.bytes, 128)) / t.split;
  const double around = (t.way == 1 ? 400 : 1500) + (t.split > 1 ? 3000 : 0);
  const double waves = static_cast<double>(ceil_div(tiles(t, p), slots(t, p.sms)));
  return waves * (std::max({tensor, shared, l2}) * steps + around);
}

// Index of the tile with the least time. `split`: whether sums over K may be cut (their order, and with it the last bits, then depends
// on the tile).
inline int choose_tile(const TileInfo* all, int count, const Problem& p) {
  int best = -1;
  double least = 0;
  for (int i = 0; i < count; ++i) {
    const TileInfo& t = all[i];
    if (t.split > 1 && ceil_div(p.k * p.bytes, 128) < 8 * t.split) continue;
    const double time = model_time(t, p);
    if (best < 0 || time < least) {
      best = i;
      least = time;
    }
  }
  return best;
}

// Tiles along M of one group of the walk: what is in flight then spans about as many bytes of x as of w.
inline int raster(const TileInfo& t) { return std::max(1, 1024 / (t.bm * t.cluster_m)); }

}  // namespace pyllm::dense
