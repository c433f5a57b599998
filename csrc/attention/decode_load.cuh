// The stream of keys and values: each warp fills a ring of its own, kSlots half steps (the keys of a step, then its values), by 16-byte
// cp.async.
#pragma once
#include "attention/decode_shape.cuh"

namespace pyllm::attention {

template <class S>
struct Loader {
  static constexpr int kItem = sizeof(typename S::Cache);
  static constexpr int kCopies = (kTileKeys * S::kChunks + 31) / 32;  // of a lane, for 16 rows
  // Whole rows to an instruction of the warp, or not (D = 96, 192).
  static constexpr bool kEven = 32 % S::kChunks == 0;

  Cursor at;
  int rank;       // of the CTA in its worker
  int shift;      // log2 of the CTAs of one
  int next = 0;   // the warp's next step in this segment,
  int last = 0;   // and the end of its CTA's part; next >= last: nothing is left
  int pages = 0;  // lane i: page of tile i % kTiles of the step `next` + (i / kTiles - turn) kWarps
  int turn = 0;
  int inside = 0;       // bytes to this lane's first 16 in a page
  bool values = false;  // are next, the keys are under way

  // To the first segment from `at` on in which this warp has steps.
  __device__ __forceinline__ void seek(const DecodeAttentionParams& p, int warp, int lane) {
    while (true) {
      const int steps = at.end() - at.step;
      next = at.step + (steps * rank >> shift) + warp;
      last = at.step + (steps * (rank + 1) >> shift);
      if (next < last) break;
      if (!at.more(p)) return;
      at.next_segment(p);
    }
    fetch_pages(p, lane);
    inside = at.head * S::kRowBytes;
    if constexpr (kEven) inside += lane / S::kChunks * p.kv_heads * S::kRowBytes + lane % S::kChunks * 16;
  }

  __device__ __forceinline__ void fetch_pages(const DecodeAttentionParams& p, int lane) {
    const int step = next + lane / S::kTiles * S::kWarps, key = step * S::kStepKeys + lane % S::kTiles * kTileKeys;
    pages = step < last && key < at.s.length ? p.page_table[at.b * p.table_stride + (key >> p.page_shift)] : 0;
    turn = 0;
  }

  // The next half step to `slot`.
  __device__ __forceinline__ void issue(const DecodeAttentionParams& p, int warp, int lane, uint32_t slot) {
    if (next >= last) return;
    const int first = next * S::kStepKeys, key_stride = p.kv_heads * S::kRowBytes;
    const char* const cache = static_cast<const char*>(values ? p.v_cache : p.k_cache);
    const int64_t page_stride = (values ? p.v_page_stride : p.k_page_stride) * kItem;
    const bool whole = first >= at.s.low && first + S::kStepKeys <= at.s.length;
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      const int key = first + t * kTileKeys, page = __shfl_sync(kAllLanes, pages, turn * S::kTiles + t);
      const char* from = cache + page * page_stride + ((key & ((1 << p.page_shift) - 1)) * key_stride + inside);
      const uint32_t to = slot + t * (kTileKeys * S::kPitch * 16);
      if (whole) {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) copy(from, to, i, lane, key_stride, true);
      } else {  // zeros stand in for the rows beyond either end: they may be NaN
        const int low = at.s.low - key, high = at.s.length - key;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          const int row = (i * 32 + lane) / S::kChunks;
          copy(from, to, i, lane, key_stride, row >= low && row < high);
        }
      }
    }
    values = !values;
    if (values) return;
    next += S::kWarps;
    if (next < last) {
      if (++turn == 32 / S::kTiles) fetch_pages(p, lane);
    } else if (at.more(p)) {
      at.next_segment(p);
      seek(p, warp, lane);
    }
  }

 private:
  __device__ __forceinline__ static void copy(const char*& from, uint32_t to, int i, int lane, int key_stride, bool read) {
    const int index = i * 32 + lane, row = index / S::kChunks, chunk = index % S::kChunks;
    if constexpr (kEven) {
      copy_async(to + place_of<S>(row, chunk), from, read ? 16 : 0);
      from += 32 / S::kChunks * key_stride;
    } else {
      if (kTileKeys * S::kChunks % 32 != 0 && row >= kTileKeys) return;
      copy_async(to + place_of<S>(row, chunk), from + row * key_stride + chunk * 16, read ? 16 : 0);
    }
  }
};

}  // namespace pyllm::attention
