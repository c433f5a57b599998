// decode_attention: o = softmax(cap tanh(scale q k^T / cap) + mask) v for a few query rows per sequence over a paged cache, in one launch.
//
// Layout: q [T, H, D], caches [pages, P, K, D] with pages of any stride, o [T, H, D]; tiles, stream and joins: decode_work.cuh,
// decode_load.cuh, decode_rows.cuh, decode_merge.cuh; for many segments decode_stream.cuh; docs/attention.md has the data flow and the
// reasons.
// Measured (H200, 32/8 heads, D = 128, pages of 64, us in a graph): B=8, 1k keys: 12.6, with an e4m3 cache 9.4. One sequence has a kernel
// of its own (decode_one.cuh), but for the shapes that it lacks.
// Limits: sm_90; D 64, 96, 128, 192, 256; P a power of two >= 16; 64 rows a sequence; rows beyond 16 per KV head (8 above D = 128)
// take another pass over the keys, through L2.
#pragma once
#include "attention/decode_load.cuh"
#include "attention/decode_merge.cuh"
#include "attention/decode_rows.cuh"
#include "common/launch.h"

namespace pyllm::attention {

__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// What a few sequences need before their first keys comes to L2 while the kernel before this one still runs. That it may write some of it
// does no harm: L2 is where everybody writes.
template <class S>
__device__ __forceinline__ void prefetch_indices(const DecodeAttentionParams& p) {
  constexpr int kLine = 32;  // entries
  const int lines = (p.width + kLine - 1) / kLine;
  if (static_cast<int64_t>(p.batch) * lines > S::kThreads) return;
  const int b = threadIdx.x / lines;
  if (b < p.batch) prefetch(p.page_table + b * p.table_stride + threadIdx.x % lines * kLine);
  if (threadIdx.x % kLine == 0 && threadIdx.x < p.batch) {
    prefetch(p.kv_lens + threadIdx.x);
    prefetch(p.q_starts + threadIdx.x);
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kCtas) decode_attention_kernel(const __grid_constant__ DecodeAttentionParams p) {
  extern __shared__ __align__(128) uint8_t decode_smem[];
  __shared__ LocateScratch<S::kWarps> scratch;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = shared_address(decode_smem) + warp * (S::kSlots * S::kHalf);
  static_assert(sizeof(MergeShared<S>) == S::kMerge && S::kRing % 16 == 0);

  prefetch_indices<S>(p);
  if (!p.beside) pdl_wait();
  pdl_trigger();
  const Run run = locate(p, scratch);
  const int worker = run.worker, shift = run.shares.shift, rank = blockIdx.x & ((1 << shift) - 1);
  Merger<S> merger{*reinterpret_cast<MergeShared<S>*>(decode_smem + S::kRing), p.lanes > 1 ? worker * p.lanes + run.at.head : worker, rank,
                   shift};
  Cursor at = run.at;
  if (at.left == 0) {
    write_empty_rows(p);
    if (p.beside && blockIdx.x == 0) pdl_wait();
    return;
  }
  Loader<S> loader{at, rank, shift};
  loader.seek(p, warp, lane);
  Rows<S> rows;
  rows.ask(p, at, lane);
  rows.clear(p, at, lane);
#pragma unroll 1
  for (int i = 0; i < S::kSlots; ++i) {
    loader.issue(p, warp, lane, ring + i * S::kHalf);
    copy_commit();
  }
  rows.convert(p);
  if (run.empty_rows) write_empty_rows(p);

  merger.begin();
  int slot = 0;
  const auto await_slot = [] {
    copy_wait<S::kSlots - 1>();
    __syncwarp();
  };
  const auto refill_slot = [&] {
    __syncwarp();
    loader.issue(p, warp, lane, ring + slot * S::kHalf);
    copy_commit();
    if (++slot == S::kSlots) slot = 0;
  };
  int before = run.before;  // numbers ahead of the sequence
#pragma unroll 1
  while (true) {
    const int steps = at.end() - at.step, last = at.step + (steps * (rank + 1) >> shift);
#pragma unroll 1
    for (int step = at.step + (steps * rank >> shift) + warp; step < last; step += S::kWarps) {
      await_slot();
      float s[S::kRowTiles][S::kTiles][4];
      rows.scores(ring + slot * S::kHalf, lane, s);
      refill_slot();
      rows.weigh(p, at, step * S::kStepKeys, lane, s);
      await_slot();
      rows.add_values(ring + slot * S::kHalf, lane, s);
      refill_slot();
    }
    int pieces = 0;
    if (at.step == at.s.first && steps < at.s.steps) {
      const int end = before + ((p.lanes > 1 ? 0 : at.head) * chunks_of(p, at.s) + at.chunk + 1) * at.s.cost(p);
      while (run.shares.begin(worker + 1 + pieces) < end) ++pieces;
    }
    const bool more = at.more(p);
    Cursor following = at;
    const auto ask_ahead = [&] {
      following.next_segment(p);
      rows.ask(p, following, lane);
    };
    constexpr bool kEarly = S::kCtas > 1;  // queries take 2,000 clocks in a busy GPU; other shapes lack the registers
    if (kEarly && more) ask_ahead();
    merger.finish(p, at, rows, pieces, more, warp, lane);
    if (!more) break;
    if (!kEarly) ask_ahead();
    if (following.b != at.b) before += numbers_of(p, at.s);
    at = following;
    rows.clear(p, at, lane);
    rows.convert(p);
  }
  if (p.beside && blockIdx.x == 0) pdl_wait();  // who waits for this kernel has waited for the one before it
}

}  // namespace pyllm::attention
