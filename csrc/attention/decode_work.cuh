// How decode shares out its keys. The keys of a sequence are cut into steps of 16 or 32; the steps of one (sequence, KV head, chunk of
// query rows) are a segment, and begin with segment_cost empty ones: what the end of a segment costs besides. All steps of a call, in this
// order, are numbered, and each worker, CTAs of one cluster, takes a run of them, all of one length to within two: equal work for any
// lengths, known to each CTA from kv_lens and q_starts alone, without a plan that a replayed graph could find stale. Workers own whole
// segments, or parts of them: at most one whose beginning they lack, and one whose end they lack. The CTAs of a worker take equal parts of
// each of its segments. Lanes: a worker is one CTA for each KV head, which takes the keys of the run for that head alone, so that what lies
// side by side in a page is read at about the same time; the map then numbers the steps of one head. Invariant: a worker has the segments
// that begin in its run, whole; the parts of the CTAs then follow from the length alone.
#pragma once
#include "attention/decode_attention.h"
#include "attention/mma.cuh"

namespace pyllm::attention {

constexpr int kTileKeys = 16;  // the rows of one mma
constexpr int kRowTile = 8;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Sequence {
  int q_start, rows;  // its rows of q
  int length, low;    // keys [low, length) are seen by some row
  int first, steps;

  // Numbers of a segment.
  __device__ __forceinline__ int cost(const DecodeAttentionParams& p) const { return steps > 0 ? p.segment_cost + steps : 0; }
};

__device__ __forceinline__ Sequence sequence_of(const DecodeAttentionParams& p, int q_start, int q_end, int length) {
  Sequence s;
  s.q_start = q_start;
  s.rows = q_end - q_start;
  s.length = length;
  s.low = p.window > 0 ? max(0, s.length - s.rows - p.window + 1) : 0;
  s.first = s.low >> p.step_shift;
  s.steps = s.rows > 0 && s.rows <= p.max_q ? ((s.length - 1) >> p.step_shift) + 1 - s.first : 0;
  return s;
}

__device__ __forceinline__ Sequence sequence_at(const DecodeAttentionParams& p, int b) {
  return sequence_of(p, p.q_starts[b], p.q_starts[b + 1], p.kv_lens[b]);
}

// Chunks of query rows of a sequence: its own, not the most of a launch, or a decode in a step of longer ones would read its keys twice.
__device__ __forceinline__ int chunks_of(const DecodeAttentionParams& p, const Sequence& s) {
  return (p.group * s.rows + (1 << p.chunk_shift) - 1) >> p.chunk_shift;
}

__device__ __forceinline__ int segments_of(const DecodeAttentionParams& p, const Sequence& s) {
  return s.steps > 0 ? (p.lanes > 1 ? 1 : p.kv_heads) * chunks_of(p, s) : 0;
}

// Rows without keys.
__device__ __forceinline__ bool is_empty(const DecodeAttentionParams& p, const Sequence& s) {
  return s.steps == 0 && s.rows > 0 && s.rows <= p.max_q;
}

// Of all segments of a sequence.
__device__ __forceinline__ int numbers_of(const DecodeAttentionParams& p, const Sequence& s) { return s.cost(p) * segments_of(p, s); }

// x / d for a quotient below 2^20.
__device__ __forceinline__ int divide(int x, int d) {
  const int q = static_cast<int>(__fdividef(static_cast<float>(x), static_cast<float>(d))), rest = x - q * d;
  return q + (rest >= d ? 1 : 0) - (rest < 0 ? 1 : 0);
}

// The numbers of each worker, equal to within two. With few to a segment there are as many workers as segments: to join a cut segment would
// take longer than what more SMs save. With very few the first workers have 4 each. Divisions would cost a kernel as short as that of a few
// sequences more than anything else it computes, so the host gives reciprocals.
struct Shares {
  int workers, total;
  int unit;   // this CTA, or, where each warp is a worker, this warp, in the grid
  int shift;  // log2 of the CTAs of a worker
  uint32_t share;
  bool few;
  __device__ __forceinline__ Shares(const DecodeAttentionParams& p, int unit, int total, int segments)
      : workers(p.workers), total(total), unit(unit), shift(p.cut_shift), share(p.share) {
    if (total <= p.whole_below) {
      workers = p.whole_workers, shift = p.cluster_shift, share = p.whole_share;
    } else if (p.even && segments > 0) {
      make_even(segments);
    }
    few = total < 4 * workers;  // else some would have nothing, for which a worker ahead of them would wait
  }
  // As many workers as have equally many of `segments` equal ones, if those are nearly all: then no segment is cut.
  __device__ __forceinline__ void make_even(int segments) {
    const int each = segments > workers ? divide(segments + workers - 1, workers) : 1, most = divide(segments + each - 1, each);
    if (most * 10 < workers * 9) return;
    workers = most;
    share = 0xffffffffu / static_cast<uint32_t>(most) + 1;
  }
  // With lanes: the units with smaller numbers, of all workers, and the KV head of this one.
  __device__ __forceinline__ int lanes_ahead(const DecodeAttentionParams& p, int unit) const { return workers * p.lanes - 1 - unit; }
  __device__ __forceinline__ int lane(const DecodeAttentionParams& p, int worker) const { return lanes_ahead(p, unit) - worker * p.lanes; }
  // The worker of a unit; beyond 0 ... workers - 1: of none. The last comes first, since workers wait for larger numbers. Whole segments
  // go to every second cluster before they go to the others: neighbours share a GPC, which cannot pass on what all of its SMs ask for (one
  // sequence of 16k keys: 29.5 us with neighbours, 23.1 us).
  __device__ __forceinline__ int number(const DecodeAttentionParams& p, int unit) const {
    if (p.lanes > 1) return divide(lanes_ahead(p, unit), p.lanes);
    const int cluster = unit >> shift;
    if (total > p.whole_below) return workers - 1 - cluster;
    return workers - 1 - ((cluster >> 1) + ((cluster & 1) == 0 ? 0 : (p.clusters + 1) >> 1));
  }
  __device__ __forceinline__ int begin(int i) const {
    if (i < 0) return total;
    if (few) return min(4 * i, total);
    return i >= workers ? total : static_cast<int>(__umulhi(static_cast<uint32_t>(total), i * share));
  }
};

// Walks over the segments of a worker's run.
struct Cursor {
  Sequence s;
  int b, head, chunk;
  int step;  // the first of the worker's steps in this segment
  int left;  // numbers still to do, from that of `step` on

  // One past the worker's last step in this segment.
  __device__ __forceinline__ int end() const { return min(s.first + s.steps, step + left); }
  // Whether there are steps in another segment.
  __device__ __forceinline__ bool more(const DecodeAttentionParams& p) const { return left - (end() - step) > p.segment_cost; }
  // read(b) is sequence b.
  template <class Read>
  __device__ __forceinline__ void next_segment(const DecodeAttentionParams& p, const Read& read) {
    left -= end() - step + p.segment_cost;
    if (++chunk == chunks_of(p, s)) {
      chunk = 0;
      if (p.lanes > 1 || ++head == p.kv_heads) {
        if (p.lanes == 1) head = 0;
        do s = read(++b);
        while (s.steps == 0);
      }
    }
    step = s.first;
  }
  __device__ __forceinline__ void next_segment(const DecodeAttentionParams& p) {
    next_segment(p, [&p](int b) { return sequence_at(p, b); });
  }
};

// Workers: of a CTA at most, 1 or each warp.
template <int Warps, int Workers = 1>
struct LocateScratch {
  int sums[Warps], segments[Warps], longest[Warps];
  int b[Workers + 1], before[Workers + 1];  // of the workers' borders
};

struct Run {
  Cursor at;
  Shares shares;
  int worker;       // its number
  int before;       // numbers ahead of sequence at.b
  bool empty_rows;  // write_empty_rows has something to do
};

// The run of a worker from the numbers of its borders. b, before: the sequences of the borders and the numbers ahead of them, without a
// meaning for a border at `total`; first: the first of these sequences.
__device__ __forceinline__ Run run_of(const DecodeAttentionParams& p, const Shares& shares, int worker, int total, int (&border)[2],
                                      const int (&b)[2], const int (&before)[2], const Sequence& first) {
  Run run{{{}, 0, 0, 0, 0, 0}, shares, worker, 0, true};
  if (border[0] >= total) return run;
  run.at.b = b[0];
  run.at.s = first;
  run.before = before[0];
  if (p.invariant) {
    const auto snap = [](int number, int before, int cost) { return before + divide(number - before + cost - 1, cost) * cost; };
    border[0] = snap(border[0], run.before, run.at.s.cost(p));
    if (border[1] < total) border[1] = snap(border[1], before[1], sequence_at(p, b[1]).cost(p));
    if (border[0] >= border[1]) return run;
    if (border[0] == run.before + numbers_of(p, run.at.s)) {
      do run.at.s = sequence_at(p, ++run.at.b);
      while (run.at.s.steps == 0);
      run.before = border[0];
    }
  }
  const int cost = run.at.s.cost(p), unit = divide(border[0] - run.before, cost), within = border[0] - run.before - unit * cost;
  const int chunks = chunks_of(p, run.at.s);
  run.at.head = chunks == 1 ? unit : divide(unit, chunks);
  run.at.chunk = unit - run.at.head * chunks;
  if (p.lanes > 1) run.at.head = shares.lane(p, worker);
  run.at.step = run.at.s.first + max(within - p.segment_cost, 0);
  run.at.left = max(border[1] - border[0] - max(p.segment_cost - within, 0), 0);
  return run;
}

__device__ __forceinline__ int sum_upto(int x, int lane) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, offset);
    if (lane >= offset) x += other;
  }
  return x;
}

// By all threads of the CTA: the run of its worker, or of the warp's; left = 0 without one. Up to 32 sequences each warp finds that of
// the CTA alone.
template <int Warps, int Workers>
__device__ __forceinline__ Run locate(const DecodeAttentionParams& p, LocateScratch<Warps, Workers>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int unit = Workers == 1 ? blockIdx.x : blockIdx.x * Workers + warp;
  int border[2], at[2], ahead[2];
  if (Workers == 1 && p.batch <= 32) {
    Sequence s{};
    if (lane < p.batch) s = sequence_at(p, lane);
    const int upto = sum_upto(numbers_of(p, s), lane), total = __shfl_sync(kAllLanes, upto, 31);
    const Shares shares(p, unit, total, p.even ? __reduce_add_sync(kAllLanes, segments_of(p, s)) : 0);
    const int worker = shares.number(p, unit);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      border[side] = shares.begin(worker + side);
      at[side] = max(__ffs(static_cast<int>(__ballot_sync(kAllLanes, border[side] < upto))) - 1, 0);
      ahead[side] = __shfl_sync(kAllLanes, upto - numbers_of(p, s), at[side]);
    }
    Sequence first;
    first.q_start = __shfl_sync(kAllLanes, s.q_start, at[0]);
    first.rows = __shfl_sync(kAllLanes, s.rows, at[0]);
    first.length = __shfl_sync(kAllLanes, s.length, at[0]);
    first.low = __shfl_sync(kAllLanes, s.low, at[0]);
    first.steps = __shfl_sync(kAllLanes, s.steps, at[0]);
    first.first = first.low >> p.step_shift;
    Run run = run_of(p, shares, worker, total, border, at, ahead, first);
    const bool last = lane == p.batch - 1 && !p.leave_padding && s.q_start + s.rows < p.tokens;
    run.empty_rows = __any_sync(kAllLanes, last || is_empty(p, s));
    return run;
  }
  const int each = (p.batch + Warps * 32 - 1) / (Warps * 32);
  const int first = min(static_cast<int>(threadIdx.x) * each, p.batch), last = min(first + each, p.batch);
  int own = 0, segments = 0, longest = 0;
  bool empty = !p.leave_padding && threadIdx.x == 0 && p.q_starts[p.batch] < p.tokens;
#pragma unroll 4
  for (int b = first; b < last; ++b) {
    const Sequence s = sequence_at(p, b);
    own += numbers_of(p, s);
    segments += segments_of(p, s);
    longest = max(longest, s.cost(p));
    empty |= is_empty(p, s);
  }
  segments = __reduce_add_sync(kAllLanes, segments);
  int upto = sum_upto(own, lane);
  longest = __reduce_max_sync(kAllLanes, longest);
  if (lane == 31) shared.sums[warp] = upto, shared.segments[warp] = segments, shared.longest[warp] = longest;
  empty = __syncthreads_or(empty);
  int total = 0;
  segments = longest = 0;
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    if (w == warp) upto += total;
    total += shared.sums[w];
    segments += shared.segments[w];
    longest = max(longest, shared.longest[w]);
  }
  // Warps: unequal segments are cut anyhow.
  if (Workers > 1 && static_cast<int64_t>(total) * 16 < static_cast<int64_t>(longest) * segments * 15) segments = 0;
  const Shares shares(p, unit, total, segments);
  const int worker = shares.number(p, unit), least = Workers == 1 ? worker : shares.number(p, blockIdx.x * Workers + Workers - 1);
  const int count = Workers == 1 ? 1 : shares.number(p, blockIdx.x * Workers) - least + 1;
#pragma unroll 1
  for (int i = 0; i <= count; ++i) {
    const int number = shares.begin(least + i);
    int before = upto - own;
    if (number >= before && number < upto) {
      int b = first;
      for (int size; number >= before + (size = numbers_of(p, sequence_at(p, b))); ++b) before += size;
      shared.b[i] = b;
      shared.before[i] = before;
    }
  }
  __syncthreads();
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    border[side] = shares.begin(worker + side);
    at[side] = border[side] < total ? shared.b[worker - least + side] : 0;
    ahead[side] = shared.before[worker - least + side];
  }
  Run run = run_of(p, shares, worker, total, border, at, ahead, sequence_at(p, at[0]));
  run.empty_rows = empty;
  return run;
}

// The query row `row` (0 .. 2^chunk_shift - 1) of a chunk: row j of the sequence and head.
struct QueryRow {
  bool exists;
  int j, head;
};
__device__ __forceinline__ QueryRow query_row(const DecodeAttentionParams& p, const Cursor& at, int row) {
  const int all = (at.chunk << p.chunk_shift) + row, j = p.group == 1 ? all : static_cast<int>(__umulhi(all, p.per_group));
  return {j < at.s.rows, j, at.head * p.group + all - j * p.group};
}

// A row's softmax over exponents of 2: `sum` of 2^(s - reference) over its keys. With its sink: what the values are multiplied by, and LSE.
struct RowEnd {
  float factor, top, sum;
  __device__ __forceinline__ float lse() const { return sum == 0.f ? -INFINITY : (top + log2_fast(sum)) * 0.6931471805599453f; }
};
__device__ __forceinline__ RowEnd finish_row(float reference, float sum, const float* sink) {
  constexpr float kLog2E = 1.4426950408889634f;
  float top = reference, factor = 1.f;
  if (sink != nullptr) {
    const float s = *sink * kLog2E;
    top = fmaxf(reference, s);
    factor = reference == -INFINITY ? 0.f : exp2_fast(reference - top);
    sum = sum * factor + (s == -INFINITY ? 0.f : exp2_fast(s - top));
  }
  return {sum == 0.f ? 0.f : __fdividef(factor, sum), top, sum};
}

// Rows without keys, and rows of q that belong to no sequence: 0, and the LSE of nothing but the sink. Shared out over all CTAs.
__device__ __forceinline__ void write_empty_rows(const DecodeAttentionParams& p) {
  const auto write = [&p](int64_t token, bool belongs) {
    uint4* const to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + token * p.heads * p.dim);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.heads * p.dim / 8; i += blockDim.x) to[i] = uint4{0, 0, 0, 0};
#pragma unroll 1
    for (int h = threadIdx.x; h < p.heads; h += blockDim.x) {
      p.lse[token * p.heads + h] = belongs && p.sinks != nullptr ? p.sinks[h] : -INFINITY;
    }
  };
#pragma unroll 1
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    const Sequence s = sequence_at(p, b);
#pragma unroll 1
    for (int i = 0; s.steps == 0 && s.rows <= p.max_q && i < s.rows; ++i) write(s.q_start + i, true);
  }
  if (p.leave_padding) return;
#pragma unroll 1
  for (int64_t token = static_cast<int64_t>(p.q_starts[p.batch]) + blockIdx.x; token < p.tokens; token += gridDim.x) write(token, false);
}

}  // namespace pyllm::attention
