// decode_attention for many segments: every warp is a worker of its own, with a run of whole segments but for the first and the last, and
// no CTA-wide barrier behind the work map. A warp's ring is filled by TMA, a box of the keys or of the values of a step at a time, which
// costs it a few instructions where 16-byte copies cost it a thousand clocks a step. Whatever a segment needs before its first key is asked
// for a segment ahead: its sequence, its page numbers, its queries.
// Measured (H200, 32/8 heads, D = 128, pages of 64, us in a graph; CTAs as workers in brackets):
//   e4m3 cache B=1024, 128 to 256 keys: 116 (196); B=128, 300: 25 (32); B=256, 1k: 131 (142); B=512, 1k to 2k: 386 (406)
//   bf16 cache B=1024, 128 to 256 keys: 207 (214); B=256, 1k: 251 (254); 1k to 2k: 365 (378)
// Limits: sm_90; D 64, 128; 8 query rows to a segment; pages at a stride of more than 0.
#pragma once
#include <cuda.h>

#include "attention/decode_load.cuh"
#include "attention/decode_merge.cuh"
#include "attention/decode_rows.cuh"
#include "common/launch.h"
#include "common/tensor_map.h"

namespace pyllm::attention {

template <class Stored, int Dim>
struct StreamShape : DecodeShape<Stored, Dim, 1> {
  using Base = DecodeShape<Stored, Dim, 1>;
  static constexpr int kWarps = kStreamWarps, kThreads = kWarps * 32;
  static constexpr bool kSplit = Base::kRowBytes > 128;  // a swizzled box is at most 128 bytes wide
  static constexpr int kParts = kSplit ? 2 : 1;
  static constexpr int kBoxBytes = Base::kRowBytes / kParts;  // of one key in a box
  static constexpr int kTailKeys = 8;                         // of the boxes of a step that is not read whole
  static constexpr int kTails = Base::kStepKeys / kTailKeys;
  static constexpr int kSlots = kRingBytes / (kWarps * Base::kHalf);
  static constexpr int kSmem = kWarps * kSlots * Base::kHalf + 1024;  // boxes start at multiples of 1 KiB
  static_assert(Base::kRowTiles == 1 && Base::kHalf % 1024 == 0 && (!kSplit || Base::kTiles == 1) && kParts * kTails <= 32);
};

// Boxes of whole steps of keys and values, then those of kTailKeys rows.
struct StreamMaps {
  CUtensorMap of[4];
};

// 32 sequences in the registers of a warp.
struct Sequences {
  int base = -32;
  int start, stop, length;  // of sequence base + lane
  __device__ __forceinline__ void ask(const DecodeAttentionParams& p, int b, int lane) {
    base = b;
    const int own = min(b + lane, p.batch - 1);
    start = p.q_starts[own], stop = p.q_starts[own + 1], length = p.kv_lens[own];
  }
  __device__ __forceinline__ Sequence at(const DecodeAttentionParams& p, int b, int lane) {
    if (static_cast<unsigned>(b - base) >= 32u) ask(p, b, lane);  // also back: who looks ahead may have met many empty sequences
    const int i = b - base;
    return sequence_of(p, __shfl_sync(kAllLanes, start, i), __shfl_sync(kAllLanes, stop, i), __shfl_sync(kAllLanes, length, i));
  }
};

// A box that is read once: it is the first to leave L2, where parts of segments, page numbers and queries stay.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, uint64_t policy, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], "
      "%3;" ::"r"(to),
      "l"(map), "r"(barrier), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A warp's stream of keys and values.
template <class S>
struct StreamLoader {
  static constexpr int kBatch = 32 / S::kTiles;  // steps whose page numbers the warp holds

  Cursor at;
  Sequences sequences{};
  int next = 0;         // step in this segment,
  int last = 0;         // and the end of the warp's part; next >= last: nothing is left
  int batch = 0;        // the step of lane 0's page
  int pages = 0;        // lane i: page of tile i % kTiles of step batch + i / kTiles
  int ahead = 0;        // the same of the batch behind this one
  int page_mask = 0;    // P - 1
  bool values = false;  // are next, the keys are under way

  __device__ __forceinline__ void begin(const DecodeAttentionParams& p, int lane) {
    page_mask = (1 << p.page_shift) - 1;
    next = batch = at.step, last = at.end();
    pages = fetch(p, at, next, last, lane);
    sequences.ask(p, at.b, lane);
  }

  // Asks for the pages behind those at hand: in the beginning once the first keys are under way.
  __device__ __forceinline__ void look_ahead(const DecodeAttentionParams& p, int lane) {
    if (batch + kBatch < last) {
      ahead = fetch(p, at, batch + kBatch, last, lane);
    } else if (at.more(p)) {
      Cursor following = at;
      advance(p, following, lane);
      ahead = fetch(p, following, following.step, following.end(), lane);
    }
  }

  // The next half step to a slot, whose barrier then completes. Of a step with rows below the window or past the end come only the boxes of
  // kTailKeys rows that hold others. Each lane has a box at most.
  __device__ __forceinline__ void issue(const DecodeAttentionParams& p, const StreamMaps& maps, int lane, uint32_t slot, uint32_t barrier) {
    if (next >= last) return;
    const int first = next * S::kStepKeys, low = at.s.low - first, high = at.s.length - first;
    int map = values ? 1 : 0, part = 0, row = 0, bytes = S::kHalf;
    bool mine;
    if (low <= 0 && high >= S::kStepKeys) {
      mine = lane < (S::kSplit || (S::kTiles == 2 && p.page_shift < 5) ? 2 : 1);
      if constexpr (S::kSplit) {
        part = lane;
      } else {
        row = lane * kTileKeys;
      }
    } else {
      part = lane / S::kTails, row = lane % S::kTails * S::kTailKeys;
      mine = part < S::kParts && row < high && row + S::kTailKeys > low;
      bytes = ((min(high, S::kStepKeys) + S::kTailKeys - 1) / S::kTailKeys - max(low, 0) / S::kTailKeys) * (S::kTailKeys * S::kRowBytes);
      map += 2;
    }
    const int page = __shfl_sync(kAllLanes, pages, ((next - batch) * S::kTiles + row / kTileKeys) & 31);
    if (lane == 0) barrier_arrive_expect(barrier, bytes);
    if (mine) {
      load_box(slot + part * (S::kHalf / 2) + row * S::kBoxBytes, maps.of + map, barrier, read_once(), part * (S::kDim / 2), at.head,
               (first + row) & page_mask, page);
    }
    values = !values;
    if (values) return;
    if (++next < last) {
      if (next - batch == kBatch) turn(p, lane);
    } else if (at.more(p)) {
      advance(p, at, lane);
      next = at.step, last = at.end();
      turn(p, lane);
    }
  }

 private:
  __device__ __forceinline__ void advance(const DecodeAttentionParams& p, Cursor& cursor, int lane) {
    cursor.next_segment(p, [&](int b) { return sequences.at(p, b, lane); });
  }

  __device__ __forceinline__ static int fetch(const DecodeAttentionParams& p, const Cursor& cursor, int step, int end, int lane) {
    const int key = step * S::kStepKeys + lane * kTileKeys;
    return key < min(end * S::kStepKeys, cursor.s.length) ? p.page_table[cursor.b * p.table_stride + (key >> p.page_shift)] : 0;
  }

  // To the batch from step `next` on, whose pages are `ahead`.
  __device__ __forceinline__ void turn(const DecodeAttentionParams& p, int lane) {
    batch = next, pages = ahead;
    look_ahead(p, lane);
  }
};

// Zeros for the values of a step that are not of the sequence, or below its window: they may be NaN. TMA overwrites them later.
template <class S>
__device__ __forceinline__ void clear_values(uint32_t values, int low, int high, int lane) {
#pragma unroll 1
  for (int i = lane; i < S::kStepKeys * S::kChunks; i += 32) {
    const int row = i / S::kChunks;
    if (row >= low && row < high) continue;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + place_of<S>(row, i % S::kChunks)), "r"(0) : "memory");
  }
  fence_async_shared();
  __syncwarp();
}

// The end of a warp's part of a segment: the result, or the part for the worker that has the segment's beginning.
template <class S>
struct StreamEnd {
  const DecodeAttentionParams& p;
  const Workspace<S> space;
  int worker, lane;

  __device__ __forceinline__ StreamEnd(const DecodeAttentionParams& p, int worker, int lane) : p(p), space(p), worker(worker), lane(lane) {}

  // `pieces` of the workers behind this one belong to the segment.
  __device__ __forceinline__ void finish(const Cursor& at, Rows<S>& rows, int pieces) const {
    const QueryRow two[2] = {query_row(p, at, lane % 4 * 2), query_row(p, at, lane % 4 * 2 + 1)};
    float4 sums = sums_of(rows);
    if (at.step != at.s.first) {
      leave(rows, sums);
      return;
    }
#pragma unroll 1
    for (int i = 1; i <= pieces; ++i) {
      add_part(rows, sums, worker + p.lanes * i);
      __syncwarp();  // the sums have many readers: cleared when all have them
      if (lane < kRowTile) space.sum(worker + p.lanes * i, 0, 0, 0)[lane].stamp = 0;
    }
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const RowEnd end = finish_row(e == 0 ? sums.x : sums.z, e == 0 ? sums.y : sums.w,
                                    p.sinks == nullptr || !two[e].exists ? nullptr : p.sinks + two[e].head);
      factor[e] = end.factor * rows.value_scale;
      if (lane < 4 && two[e].exists) p.lse[line_of(at, two[e])] = end.lse();
    }
    if constexpr (S::kWide) {
      write_pairs(at, rows, two, factor);
    } else {
      write_transposed(at, rows, factor);
    }
  }

 private:
  __device__ __forceinline__ int64_t line_of(const Cursor& at, const QueryRow& row) const {
    return static_cast<int64_t>(at.s.q_start + row.j) * p.heads + row.head;
  }
  __device__ __forceinline__ uint16_t* row_of(const Cursor& at, const QueryRow& row) const {
    return static_cast<uint16_t*>(p.out) + line_of(at, row) * S::kDim;
  }
  __device__ __forceinline__ uint32_t pair(float a, float b) const {
    return is_bf16<S>(p) ? pack_pair(a, b, __nv_bfloat16{}) : pack_pair(a, b, __half{});
  }

  __device__ __forceinline__ static float4 sums_of(const Rows<S>& rows) {
    float sum[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sum[e] = rows.sum[0][e];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum[e] += __shfl_xor_sync(kAllLanes, sum[e], offset);
    }
    return {rows.top[0][0] - S::kLift, sum[0], rows.top[0][1] - S::kLift, sum[1]};
  }

  __device__ __forceinline__ void leave(const Rows<S>& rows, const float4& sums) const {
    float4* const to = outs_of(worker);
#pragma unroll
    for (int d = 0; d < S::kBlocks; ++d) to[d * 32 + lane] = {rows.o[0][d][0], rows.o[0][d][1], rows.o[0][d][2], rows.o[0][d][3]};
    __threadfence();
    __syncwarp();
    if (lane < 4) {
      Packet* const flag = space.sum(worker, 0, 0, lane);
      store_packet(flag, sums.x, sums.y, p.stamp);
      store_packet(flag + 1, sums.z, sums.w, p.stamp);
    }
  }

  // Outputs of a part: half of the place of packets that have a stamp each, and nobody clears them. Such packets spare a fence, which a
  // warp with keys under way has time for; what is written early and read late passes through memory, of which all warps want more.
  __device__ __forceinline__ float4* outs_of(int worker) const { return reinterpret_cast<float4*>(space.out(worker, 0, 0)); }

  // The part of another worker, as soon as it is there.
  __device__ __forceinline__ void add_part(Rows<S>& rows, float4& sums, int other) const {
    Packet of_sums[2];
    const Packet* const from = space.sum(other, 0, 0, lane % 4);
    do {
      of_sums[0] = load_packet(from), of_sums[1] = load_packet(from + 1);
    } while (of_sums[0].stamp != p.stamp || of_sums[1].stamp != p.stamp);
    __threadfence();
    const float4 others{low_of(of_sums[0].floats), high_of(of_sums[0].floats), low_of(of_sums[1].floats), high_of(of_sums[1].floats)};
    const float4 mine = sums, *const outs = outs_of(other);
#pragma unroll
    for (int d = 0; d < S::kBlocks; ++d) {
      float (&o)[4] = rows.o[0][d];
      Quad quad{mine, {o[0], o[1], o[2], o[3]}};
      const Quad part[1] = {{others, __ldcg(outs + d * 32 + lane)}};
      join(quad, part);
      o[0] = quad.o.x, o[1] = quad.o.y, o[2] = quad.o.z, o[3] = quad.o.w;
      sums = quad.sums;
    }
  }

  // One-byte caches: a lane has neighbouring dimensions of its two rows.
  __device__ __forceinline__ void write_pairs(const Cursor& at, const Rows<S>& rows, const QueryRow (&two)[2],
                                              const float (&factor)[2]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!two[e].exists) continue;
      uint16_t* const to = row_of(at, two[e]) + lane / 4 * 2;
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
        const float (&o)[4] = rows.o[0][d];
        *reinterpret_cast<uint32_t*>(to + d * 16) = pair(o[e] * factor[e], o[e + 2] * factor[e]);
      }
    }
  }

  // Others: a lane has one dimension of two rows; transposed, two of one row.
  __device__ __forceinline__ void write_transposed(const Cursor& at, const Rows<S>& rows, const float (&factor)[2]) const {
    const QueryRow row = query_row(p, at, lane / 4);
    uint16_t* const to = row.exists ? row_of(at, row) + lane % 4 * 2 : nullptr;
#pragma unroll
    for (int d = 0; d < S::kBlocks; ++d) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&o)[4] = rows.o[0][d];
        const uint32_t two = transpose_matrix(pair(o[2 * half] * factor[0], o[2 * half + 1] * factor[1]));
        if (row.exists) *reinterpret_cast<uint32_t*>(to + d * 16 + half * 8) = two;
      }
    }
  }
};

// What all CTAs need first comes to L2 while the kernel before this one still runs. (That it may write some of it does no harm.)
__device__ __forceinline__ void prefetch_shared_indices(const DecodeAttentionParams& p) {
  constexpr int kLine = 32;  // entries
  const auto prefetch = [](const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); };
  const int lines = (p.width + kLine - 1) / kLine, i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i * kLine < p.batch) prefetch(p.kv_lens + i * kLine), prefetch(p.q_starts + i * kLine);
  if (i / lines < p.batch) prefetch(p.page_table + i / lines * p.table_stride + i % lines * kLine);
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    decode_stream_kernel(const __grid_constant__ DecodeAttentionParams p, const __grid_constant__ StreamMaps maps) {
  extern __shared__ uint8_t stream_smem[];
  __shared__ LocateScratch<S::kWarps, S::kWarps> scratch;
  __shared__ uint64_t barriers[S::kWarps * S::kSlots];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = (smem_address(stream_smem) + 1023) / 1024 * 1024 + warp * (S::kSlots * S::kHalf);
  const uint32_t full = smem_address(barriers + warp * S::kSlots);
  if (lane < S::kSlots) barrier_init(full + 8 * lane, 1), barrier_init_fence();
  if (threadIdx.x < 4) prefetch_map(maps.of + threadIdx.x);
  prefetch_shared_indices(p);
  __syncwarp();
  if (!p.beside) pdl_wait();
  pdl_trigger();
  const Run run = locate(p, scratch);
  Cursor at = run.at;
  if (at.left > 0) {
    StreamLoader<S> loader{at};
    loader.begin(p, lane);
    Rows<S> rows, next;
    rows.ask(p, at, lane);
    rows.clear(p, at, lane);
#pragma unroll 1
    for (int i = 0; i < S::kSlots; ++i) {
      loader.issue(p, maps, lane, ring + i * S::kHalf, full + 8 * i);
      if (i == 0) loader.look_ahead(p, lane);
    }
    rows.convert(p);
    const StreamEnd<S> writer(p, p.lanes > 1 ? run.worker * p.lanes + at.head : run.worker, lane);
    Sequences sequences = loader.sequences;
    int slot = 0, before = run.before;
    uint32_t phase = 0;
    const auto refill_slot = [&] {
      __syncwarp();
      loader.issue(p, maps, lane, ring + slot * S::kHalf, full + 8 * slot);
      if (++slot == S::kSlots) slot = 0, phase ^= 1;
    };
#pragma unroll 1
    while (true) {
      const bool more = at.more(p);
      Cursor following = at;
      if (more) {
        following.next_segment(p, [&](int b) { return sequences.at(p, b, lane); });
        next.ask(p, following, lane);
      }
      const int end = at.end();
#pragma unroll 1
      for (int step = at.step; step < end; ++step) {
        const int first = step * S::kStepKeys;
        barrier_wait(full + 8 * slot, phase);
        float s[1][S::kTiles][4];
        rows.scores(ring + slot * S::kHalf, lane, s);
        refill_slot();
        rows.weigh(p, at, first, lane, s);
        barrier_wait(full + 8 * slot, phase);
        const uint32_t values = ring + slot * S::kHalf;
        if (first < at.s.low || first + S::kStepKeys > at.s.length) {
          clear_values<S>(values, at.s.low - first, at.s.length - first, lane);
        }
        rows.add_values(values, lane, s);
        refill_slot();
      }
      int pieces = 0;
      if (at.step == at.s.first && end < at.s.first + at.s.steps) {
        const int stop = before + ((p.lanes > 1 ? 0 : at.head) * chunks_of(p, at.s) + at.chunk + 1) * at.s.cost(p);
        while (run.shares.begin(run.worker + 1 + pieces) < stop) ++pieces;
      }
      writer.finish(at, rows, pieces);
      if (!more) break;
      if (following.b != at.b) before += numbers_of(p, at.s);
      at = following;
      rows.take(next);
      rows.clear(p, at, lane);
      rows.convert(p);
    }
  }
  if (run.empty_rows) write_empty_rows(p);
  if (p.beside && blockIdx.x == 0) pdl_wait();  // who waits for this kernel has waited for the one before it
}

}  // namespace pyllm::attention
