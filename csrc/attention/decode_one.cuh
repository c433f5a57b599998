// decode_attention for one sequence of few query rows: the same clusters, ring and joins as decode_attention.cuh, but with nothing in its
// way that only many sequences need. Between the end of the kernel before it and its first copy stands one read of global memory: lengths
// and page numbers come to shared memory together; where a CTA stands is known before, but for whether segments are cut. Queries come to
// shared memory once for all warps. At the end the parts of a quad lie in neighbouring lanes, which join them by shuffles: a warp in which
// each lane reads all parts of its own takes four times as long.
// Measured (H200, 32/8 heads, D = 128, pages of 64, us in a graph; decode_attention.cuh in brackets):
//   bf16 cache 1k / 4k / 16k keys: 4.5 / 7.5 / 19.7 (6.3 / 9.7 / 22.3); e4m3 cache 4.6 / 6.3 / 12.8 (6.5 / 8.5 / 15.2)
// Limits: sm_90; D 64, 128; 8 query rows to a KV head; workers of at least two CTAs; q at multiples of 16 bytes.
#pragma once
#include <bit>

#include "attention/decode_attention.cuh"

namespace pyllm::attention {

constexpr int kOneTable = 2048;  // page numbers that a CTA holds
// A CTA's part of a sequence of `width` pages at most fits, whatever its borders: 2^cut_shift CTAs at least share it.
inline bool fits_table(const DecodeAttentionParams& p) { return p.width <= (kOneTable - 8) << p.cut_shift; }

template <class Stored, int Dim>
struct OneShape : DecodeShape<Stored, Dim, 1> {
  using Base = DecodeShape<Stored, Dim, 1>;
  static constexpr int kAtOnce = 512;  // page numbers of a sequence up to which they are asked for together with its length
  static constexpr int kPairs = Base::kQuads / 4, kLogPairs = std::bit_width(unsigned{Base::kQuads / 4}) - 1;  // of dimensions
  static constexpr int kQueryPitch = Dim * 2 + 16;  // bytes from row to row of q in shared memory: no two rows in one bank
  static_assert(Base::kRowTiles == 1 && 32 % Base::kChunks == 0);
};

// A warp's stream of keys and values, the keys and the values of a step in turn, by 16-byte cp.async.
template <class S>
struct OneLoader {
  static constexpr int kRows = 32 / S::kChunks;             // of a copy of the warp
  static constexpr int kCopies = kTileKeys / kRows;         // of 16 rows
  static constexpr int kSpots = kRows < 8 ? 8 / kRows : 1;  // copies after which the swizzle comes again
  int inside;                                               // bytes to this lane's first 16 in a page
  int spots[kSpots];                                        // and where the first copies put them in a slot
  int next, last;                                           // the warp's next step, and the end of its CTA's part
  int low, length;
  const int* pages;     // of the sequence, in shared memory
  bool values = false;  // are next, the keys are under way

  __device__ __forceinline__ OneLoader(const DecodeAttentionParams& p, int lane)
      : inside(lane / S::kChunks * p.kv_heads * S::kRowBytes + lane % S::kChunks * 16) {
#pragma unroll
    for (int i = 0; i < kSpots; ++i) spots[i] = place_of<S>(i * kRows + lane / S::kChunks, lane % S::kChunks);
  }

  // The next half step to a slot.
  __device__ __forceinline__ void issue(const DecodeAttentionParams& p, int lane, uint32_t slot) {
    if (next >= last) return;
    const int first = next * S::kStepKeys, key_stride = p.kv_heads * S::kRowBytes;
    const char* const cache = static_cast<const char*>(values ? p.v_cache : p.k_cache) + inside;
    const int64_t page_stride = (values ? p.v_page_stride : p.k_page_stride) * sizeof(typename S::Cache);
    const bool whole = first >= low && first + S::kStepKeys <= length;
#pragma unroll
    for (int t = 0; t < S::kTiles; ++t) {
      const int key = min(first + t * kTileKeys, (length - 1) & -kTileKeys);  // a tile beyond the end has no page
      const char* const from = cache + pages[key >> p.page_shift] * page_stride + (key & ((1 << p.page_shift) - 1)) * key_stride;
      const uint32_t to = slot + t * (kTileKeys * S::kPitch * 16);
      if (whole) {
        copy_rows(from, to, key_stride, [](int) { return true; });
      } else {  // zeros stand in for the rows beyond either end: they may be NaN
        const int begin = low - first - t * kTileKeys, end = length - first - t * kTileKeys, own = lane / S::kChunks;
        copy_rows(from, to, key_stride, [=](int row) { return row + own >= begin && row + own < end; });
      }
    }
    values = !values;
    if (!values) next += S::kWarps;
  }

 private:
  template <class Reads>
  __device__ __forceinline__ void copy_rows(const char* from, uint32_t to, int key_stride, const Reads& reads) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      copy_async(to + i / kSpots * (kSpots * kRows * S::kPitch * 16) + spots[i % kSpots], from, reads(i * kRows) ? 16 : 0);
      from += kRows * key_stride;
    }
  }
};

// The lanes that differ in the bits Low, 2 Low ... High / 2 of their numbers all get the join of what they have.
template <int Low, int High>
__device__ __forceinline__ void join_lanes(Quad& quad) {
  float top0 = quad.sums.x, top1 = quad.sums.z;
#pragma unroll
  for (int offset = Low; offset < High; offset *= 2) {
    top0 = fmaxf(top0, __shfl_xor_sync(kAllLanes, top0, offset)), top1 = fmaxf(top1, __shfl_xor_sync(kAllLanes, top1, offset));
  }
  const float weight0 = exp2_fast(quad.sums.x - (top0 == -INFINITY ? 0.f : top0));
  const float weight1 = exp2_fast(quad.sums.z - (top1 == -INFINITY ? 0.f : top1));
  quad.sums = {top0, quad.sums.y * weight0, top1, quad.sums.w * weight1};
  quad.o.x *= weight0, quad.o.y *= weight1, quad.o.z *= weight0, quad.o.w *= weight1;
#pragma unroll
  for (int offset = Low; offset < High; offset *= 2) {
    const auto add = [&](float& x) { x += __shfl_xor_sync(kAllLanes, x, offset); };
    add(quad.sums.y), add(quad.sums.w), add(quad.o.x), add(quad.o.y), add(quad.o.z), add(quad.o.w);
  }
}

// The end of a CTA's part, as in decode_merge.cuh, but of rows that exist alone: quads are numbered without the others.
template <class S>
struct OneEnd {
  static constexpr int kGroup = kMaxCluster;  // lanes that join the parts of a quad
  const DecodeAttentionParams& p;
  MergeShared<S>& shared;
  const Workspace<S> space;
  int worker, rank, shift;  // and the CTA's place in it, and log2 of its CTAs
  int rows;                 // of q for this KV head
  int columns;              // log2 of the pairs of rows that hold them
  int per;                  // quads of a CTA's slice

  __device__ __forceinline__ OneEnd(const DecodeAttentionParams& p, MergeShared<S>& shared, int worker, int rank, int shift, int rows)
      : p(p), shared(shared), space(p), worker(worker), rank(rank), shift(shift), rows(rows) {
    columns = rows > 4 ? 2 : rows > 2 ? 1 : 0;
    per = S::kPairs << columns >> shift;
  }

  // `pieces` of the workers behind this one belong to the sequence and head.
  __device__ __forceinline__ void finish(const Cursor& at, const Rows<S>& own, int pieces, int warp, int lane) const {
    if (threadIdx.x == 0) barrier_arrive_expect(smem_address(&shared.barrier), (16 << shift) * (per + (1 << columns)));
    leave(own, warp, lane);
    __syncthreads();
    send_slices();
    // Eight lanes have the parts of a quad; four of them write one of its two rows each, and one of its two dimensions. A thread's quads
    // are 32 apart, so that their rows are the same; what is known of these is found while the others' parts are under way.
    static_assert(S::kThreads / kGroup % 4 == 0);
    const int part = threadIdx.x % kGroup, start = threadIdx.x / kGroup, j = column(rank * per + start), row = 2 * j + part % 2;
    const bool writes = part < 4 && row < rows;
    const QueryRow query = query_row(p, at, row);
    const int64_t line = static_cast<int64_t>(at.s.q_start + query.j) * p.heads + query.head;
    uint16_t* const out = static_cast<uint16_t*>(p.out) + line * S::kDim;
    const float sink = writes && p.sinks != nullptr ? p.sinks[query.head] : -INFINITY;
    barrier_wait(smem_address(&shared.barrier), 0);
#pragma unroll 1
    for (int within = start; within < per; within += S::kThreads / kGroup) {
      const int g = rank * per + within, full = (g >> columns) * 4 + j;
      Quad quad;
      if (part < 1 << shift) quad = {shared.totals[part * 4 + j], shared.outs[part * per + within]};
      join_lanes<1, kGroup>(quad);
      if (at.step != at.s.first) {
        store(quad, full, part, within >> columns == 0);
        continue;
      }
      if (pieces > 0) gather(quad, full, part, pieces);
      if (!writes) continue;
      const RowEnd end = finish_row(part % 2 == 0 ? quad.sums.x : quad.sums.z, part % 2 == 0 ? quad.sums.y : quad.sums.w, &sink);
      const float near = part % 2 == 0 ? quad.o.x : quad.o.y, far = part % 2 == 0 ? quad.o.z : quad.o.w;
      out[Rows<S>::dimension(full / 32, part & 2, full % 32)] = rounded<S>(p, (part < 2 ? near : far) * (end.factor * own.value_scale));
      if (g >> columns == 0 && part < 2) p.lse[line] = end.lse();
    }
    if (pieces == 0) return;
    __syncthreads();  // the sums have many readers: cleared when all have them
#pragma unroll 1
    for (int i = threadIdx.x; i < pieces * kRowTile; i += S::kThreads) {
      space.sum(worker + 1 + i / kRowTile, rank, 0, 0)[i % kRowTile].stamp = 0;
    }
  }

 private:
  __device__ __forceinline__ int column(int g) const { return g & ((1 << columns) - 1); }
  __device__ __forceinline__ bool exists(int full) const { return 2 * (full % 4) < rows; }

  __device__ __forceinline__ void leave(const Rows<S>& own, int warp, int lane) const {
    float sum[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sum[e] = own.sum[0][e];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum[e] += __shfl_xor_sync(kAllLanes, sum[e], offset);
    }
    if (lane % 4 >= 1 << columns) return;
    if (lane < 4) shared.sums[warp * 4 + lane] = {own.top[0][0] - S::kLift, sum[0], own.top[0][1] - S::kLift, sum[1]};
    float4* const to = shared.exchange + warp * S::kQuads + (lane / 4 << columns) + lane % 4;
#pragma unroll
    for (int d = 0; d < S::kBlocks; ++d) to[d * 8 << columns] = {own.o[0][d][0], own.o[0][d][1], own.o[0][d][2], own.o[0][d][3]};
  }

  // Two lanes join the warps' parts of a quad, half of them each; then one sends the outputs to the CTA that has their slice, one the sums.
  __device__ __forceinline__ void send_slices() const {
    constexpr int kHalf = S::kWarps / 2, kLane = 16;
    const int base = static_cast<int>(cluster_rank()) - rank;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * (S::kPairs << columns); i += S::kThreads) {
      const int half = i / kLane % 2, g = i / (2 * kLane) * kLane + i % kLane;
      Quad quad, part[kHalf];
#pragma unroll
      for (int w = 0; w < kHalf; ++w) {
        part[w] = {shared.sums[(half * kHalf + w) * 4 + column(g)], shared.exchange[(half * kHalf + w) * S::kQuads + g]};
      }
      join(quad, part);
      join_lanes<kLane, 2 * kLane>(quad);
      if (half == 0) {
        const int to = g << shift >> (S::kLogPairs + columns);
        send(remote(&shared.outs[rank * per + (g & (per - 1))], base + to), quad.o, remote(&shared.barrier, base + to));
      } else if (g < 1 << (columns + shift)) {
        const int to = base + (g >> columns);
        send(remote(&shared.totals[rank * 4 + column(g)], to), quad.sums, remote(&shared.barrier, to));
      }
    }
  }

  // For the worker that has the beginning.
  __device__ __forceinline__ void store(const Quad& quad, int full, int lane, bool with_sums) const {
    if (!exists(full)) return;
    Packet *const outs = space.out(worker, 0, full), *const sums = space.sum(worker, rank, 0, full % 4);
    if (lane == 0) store_packet(outs, quad.o.x, quad.o.y, p.stamp);
    if (lane == 1) store_packet(outs + 1, quad.o.z, quad.o.w, p.stamp);
    if (lane == 2 && with_sums) store_packet(sums, quad.sums.x, quad.sums.y, p.stamp);
    if (lane == 3 && with_sums) store_packet(sums + 1, quad.sums.z, quad.sums.w, p.stamp);
  }

  // Each lane waits for one of the parts behind this one.
  __device__ __forceinline__ void gather(Quad& quad, int full, int lane, int pieces) const {
#pragma unroll 1
    for (int from = 0; from < pieces; from += kGroup) {
      Quad other;
      if (from + lane < pieces && exists(full)) {
        const int of = worker + 1 + from + lane;
        Packet *const sums = space.sum(of, rank, 0, full % 4), *const outs = space.out(of, 0, full);
        Packet x[4];
        do {
          x[0] = load_packet(sums), x[1] = load_packet(sums + 1), x[2] = load_packet(outs), x[3] = load_packet(outs + 1);
        } while (x[0].stamp != p.stamp || x[1].stamp != p.stamp || x[2].stamp != p.stamp || x[3].stamp != p.stamp);
        other = {{low_of(x[0].floats), high_of(x[0].floats), low_of(x[1].floats), high_of(x[1].floats)},
                 {low_of(x[2].floats), high_of(x[2].floats), low_of(x[3].floats), high_of(x[3].floats)}};
        outs[0].stamp = outs[1].stamp = 0;
      }
      __syncwarp();
      join_lanes<1, kGroup>(other);
      const Quad part[1] = {other};
      join(quad, part);
    }
  }
};

// Where a CTA stands: if segments are whole, and if they are cut.
struct OnePlace {
  int head, part, parts;  // parts: workers of a segment
  int rank, shift;        // in the worker, and log2 of its CTAs

  __device__ __forceinline__ static OnePlace whole(const DecodeAttentionParams& p) {
    const int cluster = blockIdx.x >> p.cluster_shift;  // every second one first, as in Shares::number
    return {p.whole_workers - 1 - ((cluster >> 1) + ((cluster & 1) == 0 ? 0 : (p.clusters + 1) >> 1)), 0, 1,
            static_cast<int>(blockIdx.x) & ((1 << p.cluster_shift) - 1), p.cluster_shift};
  }
  __device__ __forceinline__ static OnePlace cut(const DecodeAttentionParams& p) {
    const int worker = p.workers - 1 - static_cast<int>(blockIdx.x >> p.cut_shift), parts = divide(p.workers, p.kv_heads);
    const int head = worker < 0 ? -1 : divide(worker, parts);
    return {head, worker - head * parts, parts, static_cast<int>(blockIdx.x) & ((1 << p.cut_shift) - 1), p.cut_shift};
  }
};

__device__ __forceinline__ void copy_word(void* to, const int* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(to)), "l"(from) : "memory");
}

// What all warps of a CTA read first.
template <class S>
struct OneIndices {
  int table[kOneTable];
  int words[3];  // q_starts[0], q_starts[1], kv_lens[0]

  __device__ __forceinline__ static bool at_once(const DecodeAttentionParams& p) { return p.width <= S::kAtOnce; }

  // By all threads. The page numbers of a long table come later, those of the CTA's part alone.
  __device__ __forceinline__ Sequence read(const DecodeAttentionParams& p) {
    if (threadIdx.x < 3) copy_word(words + threadIdx.x, threadIdx.x == 2 ? p.kv_lens : p.q_starts + threadIdx.x);
#pragma unroll
    for (int i = 0; i < S::kAtOnce; i += S::kThreads) {
      const int own = i + static_cast<int>(threadIdx.x);
      if (own < p.width && at_once(p)) copy_word(table + own, p.page_table + own);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    return sequence_of(p, words[0], words[1], words[2]);
  }

  // By all threads: the numbers of all pages, of which those of steps [from, to) are there.
  __device__ __forceinline__ const int* pages(const DecodeAttentionParams& p, int from, int to, int length) {
    if (at_once(p)) return table;
    const int first = from * S::kStepKeys >> p.page_shift, last = (min(to * S::kStepKeys, length) - 1) >> p.page_shift;
#pragma unroll 1
    for (int i = threadIdx.x; i <= last - first; i += S::kThreads) copy_word(table + i, p.page_table + first + i);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    return table - first;
  }
};

// The query rows of a KV head on their way to shared memory, and from there to the registers of each warp.
template <class S>
struct OneQueries {
  static constexpr int kRowChunks = S::kDim * 2 / 16;
  static_assert(kRowTile * kRowChunks <= S::kThreads);
  __align__(16) uint8_t of[kRowTile * S::kQueryPitch];

  __device__ __forceinline__ void ask(const DecodeAttentionParams& p, const Cursor& at) {
    const int row = threadIdx.x / kRowChunks, chunk = threadIdx.x % kRowChunks;
    if (row >= kRowTile) return;
    const QueryRow own = query_row(p, at, row);
    const uint16_t* const from = static_cast<const uint16_t*>(p.q) +
                                 static_cast<int64_t>(at.s.q_start + (own.exists ? own.j : 0)) * p.q_token_stride +
                                 (own.exists ? own.head : 0) * p.q_head_stride + chunk * 8;
    copy_async(smem_address(of + row * S::kQueryPitch + chunk * 16), from, own.exists ? 16 : 0);
  }

  // As Rows::ask.
  __device__ __forceinline__ void take(Rows<S>& rows, int lane) const {
    const uint8_t* const from = of + lane / 4 * S::kQueryPitch;
#pragma unroll
    for (int d = 0; d < S::kBlocks; ++d) {
      if constexpr (S::kWide) {
        const uint2 four = *reinterpret_cast<const uint2*>(from + d * 32 + lane % 4 * 8);
        rows.q[0][d][0] = four.x, rows.q[0][d][1] = four.y;
      } else {
        rows.q[0][d][0] = *reinterpret_cast<const uint32_t*>(from + d * 32 + lane % 4 * 4);
        rows.q[0][d][1] = *reinterpret_cast<const uint32_t*>(from + d * 32 + lane % 4 * 4 + 16);
      }
    }
  }
};

// A warp's part of the sequence: steps `next`, next + kWarps ... of its CTA's.
template <class S>
__device__ __forceinline__ void attend_one(const DecodeAttentionParams& p, const Cursor& at, OneLoader<S>& loader, OneQueries<S>& queries,
                                           Rows<S>& rows, uint32_t ring, bool empty_rows, int lane) {
  queries.ask(p, at);
  copy_commit();
  const int next = loader.next;
#pragma unroll 1
  for (int i = 0; i < S::kSlots; ++i) {
    loader.issue(p, lane, ring + i * S::kHalf);
    copy_commit();
  }
  rows.key_scale = p.k_scale != nullptr ? p.k_scale[at.head * p.k_scale_step] : 1.f;
  rows.clear(p, at, lane);
  copy_wait<S::kSlots>();
  __syncthreads();
  queries.take(rows, lane);
  rows.convert(p);
  cluster_wait();  // the others' barriers are there
  if (empty_rows) write_empty_rows(p);
  int slot = 0;
  const auto await_slot = [] {
    copy_wait<S::kSlots - 1>();
    __syncwarp();
  };
  const auto refill_slot = [&] {
    __syncwarp();
    loader.issue(p, lane, ring + slot * S::kHalf);
    copy_commit();
    if (++slot == S::kSlots) slot = 0;
  };
#pragma unroll 1
  for (int step = next; step < loader.last; step += S::kWarps) {
    float scores[1][S::kTiles][4];
    await_slot();
    rows.scores(ring + slot * S::kHalf, lane, scores);
    refill_slot();
    rows.weigh(p, at, step * S::kStepKeys, lane, scores);
    await_slot();
    rows.add_values(ring + slot * S::kHalf, lane, scores);
    refill_slot();
  }
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) decode_one_kernel(const __grid_constant__ DecodeAttentionParams p) {
  extern __shared__ __align__(128) uint8_t one_smem[];
  __shared__ OneIndices<S> indices;
  __shared__ OneQueries<S> queries;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  MergeShared<S>& shared = *reinterpret_cast<MergeShared<S>*>(one_smem + S::kRing);
  if (threadIdx.x == 0) {
    barrier_init(smem_address(&shared.barrier), 1);
    barrier_init_fence();
  }
  prefetch_indices<S>(p);
  const OnePlace whole = OnePlace::whole(p), cut = OnePlace::cut(p);
  OneLoader<S> loader(p, lane);
  __syncwarp();
  cluster_arrive();

  pdl_wait();
  pdl_trigger();
  const Sequence s = indices.read(p);
  const OnePlace place = p.kv_heads * s.cost(p) <= p.whole_below ? whole : cut;
  const bool empty_rows = s.steps == 0 || (!p.leave_padding && s.q_start + s.rows < p.tokens);
  if (s.steps == 0 || place.head < 0) {
    cluster_wait();
    if (empty_rows) write_empty_rows(p);
    return;
  }
  int begin = 0, end = s.steps;
  if (place.parts > 1) begin = divide(s.steps * place.part, place.parts), end = divide(s.steps * (place.part + 1), place.parts);
  const int steps = end - begin;
  const Cursor at{s, 0, place.head, 0, s.first + begin, steps};
  const int from = at.step + (steps * place.rank >> place.shift), to = at.step + (steps * (place.rank + 1) >> place.shift);
  loader.next = from + warp, loader.last = to, loader.low = s.low, loader.length = s.length;
  loader.inside += place.head * S::kRowBytes;
  loader.pages = indices.pages(p, from, to, s.length);
  Rows<S> rows;
  attend_one<S>(p, at, loader, queries, rows, smem_address(one_smem) + warp * (S::kSlots * S::kHalf), empty_rows, lane);
  const OneEnd<S> writer(p, shared, place.head * place.parts + place.part, place.rank, place.shift, p.group * s.rows);
  writer.finish(at, rows, place.part == 0 ? place.parts - 1 : 0, warp, lane);
}

}  // namespace pyllm::attention
