// sample_tokens: one token per row of logits: temperature, top-k, top-p, min-p, then a draw by inverse distribution function.
//
// A cluster of 1 ... 16 CTAs per row (launch_shape.h), one read of global memory that also finds the maximum (row.cuh), then
//   greedy  lowest id of the maximum (1 exchange).
//   top-k   a shortlist of little more than k tokens (select.cuh, 2 exchanges); one warp of CTA 0 draws from it.
//   other   sum the weights as integers per warp in the order of ids, multiply the sum by a random fraction, and find the token there: two
//           exchanges. top-p: a token outside of the nucleus is rejected, and the draw repeated among the tokens ahead of it: the sum of
//           those is what decides on the token as well, so a round is one pass. That costs a pass more than plain for 1 - p of the rows
//           another, and no sorting, histogram or atomic.
// Integer sums make the draw independent of the spread over CTAs, warps and lanes.
// Estimates, V = 128256, 256 rows, us: read 14 (bf16) or 29 (fp32) at 4.6 TB/s; a pass over the weights 10 (one exp2 per token, at 16 per
// clock and SM, is 8.4), plus what of the row does not fit shared memory: 70 % of bf16, 85 % of fp32, again from L2 or HBM.
// Measured, H200, V = 128256, bf16 and fp32, us: 1 row: greedy 2.3, 2.7; plain 5.3, 5.6; top-k + top-p + min-p 5.5, 5.8; top-p 7.2, 8.3.
// 256 rows: greedy 19, 35; plain 34, 54; top-k + top-p + min-p 25, 40; top-p 60, 80.
#pragma once
#include "common/launch.h"
#include "sampling/philox.cuh"
#include "sampling/sample_tokens.h"
#include "sampling/select.cuh"

namespace pyllm::sampling {

struct Settings {  // of one row
  float temperature, share, min_p;
  float least;  // log2 weight under which min-p drops a token
  uint32_t k;   // 0: off
  Stream stream;

  __device__ void read(const SampleTokensParams& p, int64_t row) {
    temperature = p.temperature ? p.temperature[row] : 0.f;
    share = p.top_p ? p.top_p[row] : 1.f;
    share = share < 1.f ? fmaxf(share, 0.f) : 1.f;
    min_p = p.min_p ? p.min_p[row] : 0.f;
    const int top_k = p.top_k ? p.top_k[row] : 0;
    k = top_k > 0 && top_k < p.vocab ? top_k : 0;
    const uint64_t seed = p.seed ? static_cast<uint64_t>(p.seed[row]) : 0;
    stream = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), p.index ? static_cast<uint32_t>(p.index[row]) : 0,
              p.position ? static_cast<uint32_t>(p.position[row]) : 0};
  }
  __device__ bool greedy() const { return !(temperature > 0.f) || k == 1 || share == 0.f; }
  // Bounded on both sides, so that 0 * inverse and -inf * inverse are never NaN.
  __device__ float inverse() const { return fminf(kLog2e / fminf(temperature, 1e37f), 3e38f); }
  __device__ void set_least() { least = min_p > 0.f ? log2f(fminf(min_p, 1.f)) : -INFINITY; }
  // What the tokens ahead of a token of the nucleus weigh less than, given all tokens' weight; top-p off: anything.
  __device__ uint64_t target(uint64_t total) const {
    if (!(share < 1.f)) return ~0ull;
    const double mass = ceil(static_cast<double>(share) * static_cast<double>(total));
    return mass > 1.0 ? static_cast<uint64_t>(mass) : 1;
  }
};

// The tokens a draw is among: at or before (logit, id) in the order, log2 weight at least `floor`.
struct Filter {
  Scale scale;
  float logit;
  int id;
  float floor;
  bool all;  // neither of the two drops a token

  // The mass of tokens id ... id + e, for e = 0 ... 3; exact: 2^-31 per token, as in a list of top-k tokens, else 2^-40 of the running sum.
  __device__ __forceinline__ void masses(const float (&x)[4], uint32_t token, bool exact, uint64_t (&mass)[4]) const {
    float sum = 0.f;
    uint64_t exact_sum = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float y = scale.log2_weight(x[e]);
      // No short circuits: they would be branches.
      const bool ahead = (x[e] > logit) | ((x[e] == logit) & (static_cast<int>(token) + e <= id));
      const bool kept = all | (ahead & (y >= floor));
      const float w = kept ? exp2_fast(y) : 0.f;
      sum += w;
      exact_sum += __float2uint_rn(w * kMassUnit);
      mass[e] = exact ? exact_sum : __float2ull_rn(sum * kTotalUnit);
    }
  }
};

constexpr int kMaxSpan = 128;  // 2^20 tokens in chunks of 512, 16 warps

template <class T, int kThreads>
struct SampleWork : Work<T, kThreads> {
  Settings set;
  int32_t* out;
  alignas(16) uint64_t warp_mass[kMaxWarps];
  uint64_t chunk_mass[kMaxSpan];
  uint64_t hit;  // logit's bits, id
};

// Sums masses over the slice into work.warp_mass, and exchanges the CTAs' sums (kMassSlot).
template <class T, int kThreads>
__device__ void sum_masses(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, const Filter& filter) {
  const Row<T, kThreads> row = work.row;
  uint64_t sum = 0;
  FixedSum fixed;
  const Scale scale = filter.scale;
  if (work.set.k != 0 || !isfinite(scale.top)) {
    row.for_each_four([&](int i, const float (&x)[4]) {
      uint64_t mass[4];
      filter.masses(x, row.id(i), work.set.k != 0, mass);
      sum += mass[3];
    });
  } else if (filter.all) {
    row.for_each([&](int, const float (&x)[4]) {
      float part = 0.f;
#pragma unroll
      for (int e = 0; e < 4; ++e) part += exp2_fast(scale.finite_log2_weight(x[e]));
      fixed.add(part);
    });
    sum = fixed.total(4 * row.chunks_of(threadIdx.x / 32));
  } else {
    const Limits limits = Limits::make(filter.logit, filter.id);
    const float floor = filter.floor;
    const int fours = row.for_each_from(filter.logit, work.queues, [&](int i, const float (&x)[4]) {
      const int id = static_cast<int>(row.id(i));
      float part = 0.f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float y = scale.finite_log2_weight(x[e]), w = exp2_fast(y);
        part += (x[e] >= limits.of(id + e)) & (y >= floor) ? w : 0.f;
      }
      fixed.add(part);
    });
    sum = fixed.total(fours);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) work.warp_mass[threadIdx.x / 32] = sum;
  cluster.publish(kMassSlot, [&] {
    uint64_t mine = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) mine += work.warp_mass[w];
    return Slot{mine, 0};
  });
}

// The token at which the mass passes `at` in chunk c of warp w's tokens: f(logit, id) in the lane that has it. By one warp.
template <class T, int kThreads, class F>
__device__ __forceinline__ void pick(const Row<T, kThreads>& row, const Filter& filter, bool exact, int w, int c, uint64_t at, F&& f) {
  constexpr int kSteps = Row<T, kThreads>::kLaneTokens / 4;
  const int lane = thread_id() % 32, first = lane * 4 * kSteps;
  const uint32_t id = row.id((w * row.span + c) * row.kChunk);
  uint64_t part[kSteps], mass[4], sum = 0;
  float x[4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    row.four(w, c, first + 4 * s, x);
    filter.masses(x, id + first + 4 * s, exact, mass);
    sum += part[s] = mass[3];
  }
  const uint32_t owner = find_share(sum, warp_scan(sum), at);
  if (lane != owner) return;
  int step = first;
#pragma unroll
  for (int s = 0; s < kSteps - 1; ++s) {
    if (step == first + 4 * s && at >= part[s]) {
      at -= part[s];
      step += 4;
    }
  }
  row.four(w, c, step, x);
  filter.masses(x, id + step, exact, mass);
  const int e = (at >= mass[0]) + (at >= mass[1]) + (at >= mass[2]);
  f(e == 0 ? x[0] : e == 1 ? x[1] : e == 2 ? x[2] : x[3], id + step + e);
}

// The same in the CTA's slice, after sum_masses. f is called by one thread, after which the CTA has no barrier.
template <class T, int kThreads, class F>
__device__ void locate(SampleWork<T, kThreads>& work, const Filter& filter, uint64_t at, F&& f) {
  const Row<T, kThreads> row = work.row;
  const int warp = thread_id() / 32, lane = thread_id() % 32;
  const bool exact = work.set.k != 0;
  const uint64_t share = lane < kThreads / 32 ? work.warp_mass[lane] : 0;
  const int w = find_share(share, warp_scan(share), at);
  int c = 0;
  if (row.span > 1) {
#pragma unroll 1
    for (c = warp; c < row.chunks_of(w); c += kThreads / 32) {
      uint64_t sum = 0;
      row.visit(w, c, row.load(w, c), [&](int i, const float (&x)[4]) {
        uint64_t mass[4];
        filter.masses(x, row.id(i), exact, mass);
        sum += mass[3];
      });
      sum = warp_sum(sum);
      if (lane == 0) work.chunk_mass[c] = sum;
    }
    __syncthreads();
    if (warp != 0) return;
#pragma unroll 1
    for (c = 0;; c += 32) {
      const uint64_t mass = c + lane < row.chunks_of(w) ? work.chunk_mass[c + lane] : 0, scan = warp_scan(mass);
      const uint64_t total = __shfl_sync(kAll, scan, 31);
      if (at < total) {
        c += find_share(mass, scan, at);
        break;
      }
      at -= total;
    }
  }
  if (warp == 0) pick(row, filter, exact, w, c, at, f);
}

// A draw from the whole row (limit 0) or its tokens at or before `limit`; CTA 0 or the CTA that holds the token writes it.
template <class T, int kThreads>
__device__ void draw_from_row(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, uint64_t limit) {
  const Settings& set = work.set;
  Filter filter{work.scale, limit ? value_of(limit) : -INFINITY, limit ? static_cast<int>(id_of(limit)) : INT32_MAX,
                set.share < 1.f ? -INFINITY : set.least, false};
  filter.all = limit == 0 && filter.floor == -INFINITY;
  uint64_t target = 0;
  for (uint32_t round = 0;; ++round) {
    sum_masses(work, cluster, filter);
    const uint64_t share_of = cluster.lane_slot(kMassSlot).a, scan = warp_scan(share_of), total = __shfl_sync(kAll, scan, 31);
    if (round == 0) {
      target = set.target(total);
    } else if (total < target && filter.scale.log2_weight(filter.logit) >= set.least) {
      if (cluster.rank() == 0 && threadIdx.x == 0) *work.out = filter.id + 1;
      return;
    }
    uint64_t at = __umul64hi(random_bits(set.stream, round), total);
    const uint32_t owner = find_share(share_of, scan, at);
    if (owner == cluster.rank()) {
      locate(work, filter, at, [&](float x, uint32_t id) {
        work.hit = static_cast<uint64_t>(__float_as_uint(x)) << 32 | id;
        if (!(set.share < 1.f)) *work.out = static_cast<int32_t>(id);
      });
    }
    if (!(set.share < 1.f)) return;
    cluster.publish(kDrawnSlot, [&] { return Slot{work.hit, 0}; });
    const uint64_t hit = cluster.slot(kDrawnSlot, owner).a;
    filter.logit = __uint_as_float(static_cast<uint32_t>(hit >> 32));
    filter.id = static_cast<int>(static_cast<uint32_t>(hit)) - 1;
    filter.floor = set.least;
    filter.all = false;
  }
}

// Orders the n tokens of CTA 0's work.items by id into work.found, with their masses: 0 behind the first k. Ends with a barrier.
template <class T, int kThreads>
__device__ void order_list(SampleWork<T, kThreads>& work, uint32_t n) {
  constexpr uint32_t kLanes = 8;  // per token
  const uint32_t lane = threadIdx.x % kLanes, k = work.set.k;
  const Scale scale = work.scale;
#pragma unroll 1
  for (uint32_t i = threadIdx.x / kLanes; i - threadIdx.x % 32 / kLanes < n; i += kThreads / kLanes) {
    const uint64_t mine = work.items[min(i, n - 1)];
    uint32_t ahead = 0;  // in the order; times 2^16: with a lower id
#pragma unroll 4
    for (uint32_t j = lane; j < n; j += kLanes) {
      const uint64_t other = work.items[j];
      ahead += (other > mine ? 1u : 0u) + (id_of(other) < id_of(mine) ? 1u << 16 : 0u);
    }
#pragma unroll
    for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2) ahead += __shfl_xor_sync(kAll, ahead, offset);
    if (lane == 0 && i < n) {
      work.found[ahead >> 16] = mine;
      work.item_mass[ahead >> 16] = (ahead & 0xffff) < k ? scale.mass(value_of(mine)) : 0;
    }
  }
  __syncthreads();
}

// The same draw as draw_from_row, on the list that CTA 0 has; by one warp, each lane some neighbours of the list in the order of ids.
template <class T, int kThreads>
__device__ int draw_from_list(SampleWork<T, kThreads>& work, uint32_t n) {
  const uint32_t lane = threadIdx.x % 32, per = (n + 31) / 32, first = min(lane * per, n), last = min(first + per, n);
  const float share = work.set.share, least = work.set.least;
  const Scale scale = work.scale;
  uint64_t limit = 0, target = ~0ull, random = 0;
  float floor = share < 1.f ? -INFINITY : least;
  for (uint32_t round = 0;; ++round) {
    if (round % 32 == 0) random = random_bits(work.set.stream, round + lane);
    const auto mass_of = [&](uint32_t i) {
      const uint64_t place = work.found[i];
      return place >= limit && scale.log2_weight(value_of(place)) >= floor ? work.item_mass[i] : 0u;
    };
    uint64_t own = 0;
#pragma unroll 1
    for (uint32_t i = first; i < last; ++i) own += mass_of(i);
    const uint64_t scan = warp_scan(own), total = __shfl_sync(kAll, scan, 31);
    if (round == 0) target = work.set.target(total);
    uint64_t at = __umul64hi(__shfl_sync(kAll, random, round % 32), total);
    const uint32_t owner = find_share(own, scan, at);
    uint32_t i = first;
    if (lane == owner) {
#pragma unroll 1
      for (; at >= mass_of(i); ++i) at -= mass_of(i);
    }
    const uint64_t hit = work.found[__shfl_sync(kAll, i, owner)];
    const bool large = scale.log2_weight(value_of(hit)) >= least;
    if (!(share < 1.f)) return static_cast<int>(id_of(hit));
    uint64_t ahead = 0;
#pragma unroll 1
    for (uint32_t j = first; j < last; ++j) ahead += work.found[j] > hit ? work.item_mass[j] : 0u;
    if (large && warp_sum(ahead) < target) return static_cast<int>(id_of(hit));
    limit = hit + 1;
    floor = least;
  }
}

template <class T, int kThreads>
__device__ void greedy_token(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, float own) {
  const Row<T, kThreads> row = work.row;
  const uint32_t key = cluster.block_max(order_key(own));
  const float most = from_order_key(key);
  const bool finite = isfinite(most) || (most == INFINITY && __syncthreads_or(row.any_finite()));
  uint32_t id = 0xffffffffu;
  if (__any_sync(kAll, own == most)) {
    row.for_each_from(most, work.queues, [&](int i, const float (&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) id = x[e] == most && row.inside(i + e) ? min(id, row.id(i + e)) : id;
    });
  }
  id = cluster.block_min(id);
  if (!cluster.deliver({static_cast<uint64_t>(key) << 32 | ~id, finite})) return;
  if (threadIdx.x >= 32) return;
  const Slot theirs = cluster.lane_slot(kLastSlot);
  const uint32_t top = __reduce_max_sync(kAll, static_cast<uint32_t>(theirs.a >> 32));
  const uint32_t first = __reduce_max_sync(kAll, theirs.a >> 32 == top ? static_cast<uint32_t>(theirs.a) : 0u);
  const bool valid = __any_sync(kAll, theirs.b != 0) && top != 0xffffffffu;
  if (threadIdx.x == 0) *work.out = valid ? static_cast<int>(~first) : -1;
}

template <class T, int kThreads>
__device__ void drawn_token(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, float own) {
  const uint32_t k = work.set.k;
  const Top top =
      exchange_top(cluster, work.row, own, k <= kBrief<kThreads> ? k : 0, work.keys, reinterpret_cast<uint32_t*>(work.exchange.parts[0]));
  if (!top.valid) {
    if (cluster.rank() == 0 && threadIdx.x == 0) *work.out = -1;
    return;
  }
  const bool brief = k > 0 && k <= kBrief<kThreads>;
  if (threadIdx.x == 0) {
    work.scale = {top.max, work.set.inverse()};
    work.low = top.low;
  }
  __syncthreads();
  uint64_t limit = 0;
  if (k) {
    Selector<T, kThreads> selector(work, cluster);
    const uint32_t n = brief ? selector.shortlist() : 0;
    if (n > 0) {
      if (cluster.rank() != 0) return;
      order_list(work, n);
      if (threadIdx.x >= 32) return;
      const int token = draw_from_list(work, n);
      if (threadIdx.x == 0) *work.out = token;
      return;
    }
    limit = selector.place_of_kth(k);
  }
  draw_from_row(work, cluster, limit);
}

// grid: rows * cluster; dynamic shared memory: SampleWork, `held` tokens, their bounds (Row::tops).
template <class T, int kThreads>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void sample_tokens_kernel(SampleTokensParams p, int slice, int held) {
  extern __shared__ __align__(16) unsigned char smem[];
  auto& work = *reinterpret_cast<SampleWork<T, kThreads>*>(smem);
  Cluster<kThreads> cluster(work.exchange);
  const int64_t at = blockIdx.x / cluster.size();
  Row<T, kThreads> row;
  row.open(static_cast<const T*>(p.logits) + at * p.row_stride, static_cast<int>(p.vocab), slice, held, cluster.rank(),
           reinterpret_cast<T*>(smem + sizeof(work)));
  pdl_wait();
  Settings set;
  if (threadIdx.x == 0) set.read(p, at);  // kept in registers until the row is staged: the two latencies overlap
  const float own = row.stage();
  if (threadIdx.x == 0) {
    work.row = row;
    set.set_least();  // here, where min_p has arrived
    work.set = set;
    work.out = p.tokens + at;
    work.found_count = 0;
  }
  pdl_trigger();
  cluster.open();
  if (work.set.greedy()) {
    greedy_token(work, cluster, own);
  } else {
    drawn_token(work, cluster, own);
  }
}

}  // namespace pyllm::sampling
