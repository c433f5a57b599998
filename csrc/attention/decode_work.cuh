// How decode shares out its keys. The keys of a sequence are cut into tiles of kTileKeys; (sequence, KV head, chunk of query rows, tile),
// in this order, number all the tiles of a step, and each worker takes a run of them, all of one length to within one: equal work for any
// lengths, known to each CTA from kv_lens and q_starts alone, without a plan that a replayed graph could find stale.
// A segment is the run of tiles of one (sequence, KV head, chunk). Workers own whole segments, or pieces: at most two pieces each.
#pragma once
#include "attention/decode_attention.h"

namespace pyllm::attention {

constexpr int kWarps = 4;
constexpr int kStepKeys = 16;  // of one warp: the rows of one mma
constexpr int kTileKeys = kWarps * kStepKeys;
constexpr int kRowTile = 8;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Sequence {
  int q_start, rows;  // its rows of q
  int length, low;    // keys [low, length) are seen by some row
  int first, tiles;
};

__device__ __forceinline__ Sequence sequence_at(const DecodeAttentionParams& p, int b) {
  Sequence s;
  s.q_start = p.q_starts[b];
  s.rows = p.q_starts[b + 1] - s.q_start;
  s.length = p.kv_lens[b];
  s.low = p.window > 0 ? max(0, s.length - s.rows - p.window + 1) : 0;
  s.first = s.low / kTileKeys;
  s.tiles = s.rows > 0 ? (s.length + kTileKeys - 1) / kTileKeys - s.first : 0;
  return s;
}

__device__ __forceinline__ int units_of(const DecodeAttentionParams& p) { return p.kv_heads * p.chunks; }

// The tiles of each worker: the first `more` have one more than the others. No more workers than tiles, so that with few tiles the first
// CTAs, which stand on different SMs, have them.
struct Shares {
  int workers, size, more;
  __device__ __forceinline__ Shares(const DecodeAttentionParams& p, int total)
      : workers(max(min(p.workers, total), 1)), size(total / workers), more(total - size * workers) {}
  __device__ __forceinline__ int begin(int i) const { return i * size + min(i, more); }
  __device__ __forceinline__ int owner(int tile) const {
    const int large = more * (size + 1);
    return tile < large ? tile / (size + 1) : more + (tile - large) / size;
  }
};

struct Place {
  int b;       // the sequence of the tile that was looked for
  int before;  // tiles ahead of that sequence
  int total;   // tiles of the step
};

template <int Warps>
struct LocateScratch {
  int sums[Warps];
  int b, before;
};

// By all threads of the CTA: finds the tile number target(total tiles). Without such a tile b and before mean nothing.
template <int Warps, class Target>
__device__ __forceinline__ Place locate(const DecodeAttentionParams& p, LocateScratch<Warps>& shared, Target target) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, units = units_of(p);
  const int each = (p.batch + Warps * 32 - 1) / (Warps * 32);
  const int first = min(static_cast<int>(threadIdx.x) * each, p.batch), last = min(first + each, p.batch);
  int own = 0;
  for (int b = first; b < last; ++b) own += sequence_at(p, b).tiles;
  own *= units;
  int upto = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, upto, offset);
    if (lane >= offset) upto += other;
  }
  if (lane == 31) shared.sums[warp] = upto;
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    if (w == warp) upto += total;
    total += shared.sums[w];
  }
  const int wanted = target(total);
  int before = upto - own;
  if (wanted >= before && wanted < upto) {
    int b = first;
    for (int size; wanted >= before + (size = sequence_at(p, b).tiles * units); ++b) before += size;
    shared.b = b;
    shared.before = before;
  }
  __syncthreads();
  return {shared.b, shared.before, total};
}

// Walks over the tiles of a worker.
struct Cursor {
  Sequence s;
  int b, unit;  // unit: KV head * chunks + chunk
  int tile;
  int left;  // tiles still to do, this one included

  // One past the worker's last tile in this segment.
  __device__ __forceinline__ int end() const { return min(s.first + s.tiles, tile + left); }
  // Only while there are tiles left.
  __device__ __forceinline__ void next_segment(const DecodeAttentionParams& p) {
    if (++unit == units_of(p)) {
      unit = 0;
      do s = sequence_at(p, ++b);
      while (s.tiles == 0);
    }
    tile = s.first;
  }
};

// The query row `row` (0 .. 8 row_tiles - 1) of a chunk: row j of the sequence and head.
struct QueryRow {
  bool exists;
  int j, head;
};
__device__ __forceinline__ QueryRow query_row(const DecodeAttentionParams& p, int unit, int rows, int row) {
  const int chunk = unit % p.chunks, kv_head = unit / p.chunks;
  const int all = chunk * p.row_tiles * kRowTile + row, j = all / p.group;
  return {j < rows, j, kv_head * p.group + all - j * p.group};
}

// A row's softmax over exponents of 2: `sum` of 2^(s - reference) over its keys. With its sink: what the values are multiplied by, and LSE.
struct RowEnd {
  float factor, lse;
};
__device__ __forceinline__ RowEnd finish_row(float reference, float sum, const float* sink) {
  constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
  float top = reference, factor = 1.f;
  if (sink != nullptr) {
    const float s = *sink * kLog2E;
    top = fmaxf(reference, s);
    factor = reference == -INFINITY ? 0.f : exp2f(reference - top);
    sum = sum * factor + (s == -INFINITY ? 0.f : exp2f(s - top));
  }
  if (sum == 0.f) return {0.f, -INFINITY};
  return {factor / sum, (top + log2f(sum)) * kLn2};
}

}  // namespace pyllm::attention
