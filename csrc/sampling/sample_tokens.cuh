// sample_tokens: one token per row of logits: temperature, top-k, top-p, min-p, then a draw by inverse distribution function.
//
// A cluster of 1 ... 16 CTAs per row (launch_shape.h), one read of global memory that also finds the maximum (row.cuh), then
//   greedy  lowest id of the maximum (1 exchange).
//   top-k   a shortlist of little more than k tokens (select.cuh, 2 exchanges); CTA 0 finishes alone on it.
//   other   sum the weights as integers per warp in the order of ids, multiply the sum by a random fraction, and find the token there: two
//           exchanges. top-p: a token outside of the nucleus is rejected, and the draw repeated among the tokens ahead of it: the sum of
//           those is what decides on the token as well, so a round is one pass. That costs a pass more than plain for 1 - p of the rows
//           another, and no sorting, histogram or atomic.
// Integer sums make the draw independent of the spread over CTAs, warps and lanes.
// Estimates, V = 128256, 256 rows, us: read 14 (bf16) or 29 (fp32) at 4.6 TB/s; a pass over the weights 10 (one exp2 per token, at 16 per
// clock and SM, is 8.4), plus what of the row does not fit shared memory: 60 % of bf16, 80 % of fp32, again from L2 or HBM.
#pragma once
#include <type_traits>

#include "common/launch.h"
#include "sampling/philox.cuh"
#include "sampling/sample_tokens.h"
#include "sampling/select.cuh"

namespace pyllm::sampling {

struct Settings {  // of one row
  float temperature, share, min_p;
  uint32_t k;  // 0: off
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
  // Log2 weight under which min-p drops a token.
  __device__ float least() const { return min_p > 0.f ? log2f(fminf(min_p, 1.f)) : -INFINITY; }
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
  bool all;    // neither of the two drops a token
  bool exact;  // masses are 2^-31 per token, as in a list of top-k tokens; else 2^-40 of the running sum over four tokens

  __device__ __forceinline__ float weight(float x, uint32_t token) const {
    const float y = scale.log2_weight(x);
    const bool kept = all || ((x > logit || (x == logit && static_cast<int>(token) <= id)) && y >= floor);
    return kept ? exp2_fast(y) : 0.f;
  }
  // The mass of tokens id ... id + e, for e = 0 ... 3.
  template <bool kExact>
  __device__ __forceinline__ void masses(const float (&x)[4], uint32_t token, uint64_t (&mass)[4]) const {
    float sum = 0.f;
    uint64_t exact_sum = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float w = weight(x[e], token + e);
      if constexpr (kExact) {
        mass[e] = exact_sum += __float2uint_rn(w * kMassUnit);
      } else {
        sum += w;
        mass[e] = __float2ull_rn(sum * kTotalUnit);
      }
    }
  }
  __device__ __forceinline__ void masses(const float (&x)[4], uint32_t token, uint64_t (&mass)[4]) const {
    if (exact) {
      masses<true>(x, token, mass);
    } else {
      masses<false>(x, token, mass);
    }
  }
};

constexpr int kMaxSpan = 128;  // 2^20 tokens in chunks of 512, 16 warps

template <class T, int kThreads>
struct SampleWork : Work<T, kThreads> {
  Settings set;
  int32_t* out;
  uint64_t warp_mass[kMaxWarps], chunk_mass[kMaxSpan];
  uint64_t hit;  // logit's bits, id
  alignas(16) float chunk[Row<T, kThreads>::kChunk];
};

// Sums masses over the slice into work.warp_mass, and exchanges the CTAs' sums (kMassSlot).
template <class T, int kThreads>
__device__ uint64_t sum_masses(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, const Filter& given) {
  const Row<T, kThreads> row = work.row;
  Filter filter = given;
  uint64_t sum = 0;
  // Three copies of the pass: what a row does not need would otherwise cost each of its tokens several instructions.
  const auto add = [&](auto exact) {
    row.for_each([&](int i, const float (&x)[4]) {
      uint64_t mass[4];
      filter.template masses<decltype(exact)::value>(x, row.id(i), mass);
      sum += mass[3];
    });
  };
  if (given.exact) {
    filter.all = false;
    add(std::true_type());
  } else if (given.all) {
    filter.all = true;
    add(std::false_type());
  } else {
    filter.all = false;
    add(std::false_type());
  }
  sum = warp_all(sum, Sum());
  __syncthreads();  // the last round's sums have been read
  if (threadIdx.x % 32 == 0) work.warp_mass[threadIdx.x / 32] = sum;
  __syncthreads();
  uint64_t mine = 0;
  for (int w = 0; w < kThreads / 32; ++w) mine += work.warp_mass[w];
  cluster.publish(kMassSlot, {mine, 0});
  uint64_t total = 0;
  for (uint32_t r = 0; r < cluster.size(); ++r) total += cluster.slot(kMassSlot, r).a;
  return total;
}

// Within chunk c of warp w's tokens, the token at which the mass passes `at`, into work.hit. By one warp; the chunk goes through shared
// memory, so that each lane has sixteen consecutive tokens.
template <class T, int kThreads>
__device__ void pick(SampleWork<T, kThreads>& work, const Filter& filter, int w, int c, uint64_t at) {
  const Row<T, kThreads> row = work.row;
  const int lane = threadIdx.x % 32, first = (w * row.span + c) * row.kChunk;
  row.visit(w, c, [&](int i, const float (&x)[4]) { store_vec(work.chunk + i - first, Vec<float, 4>{x[0], x[1], x[2], x[3]}); });
  __syncwarp();
  const auto masses_at = [&](int i, float (&x)[4], uint64_t (&mass)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = work.chunk[i + e];
    filter.masses(x, row.id(first + i), mass);
  };
  float x[4];
  uint64_t mass[4], sum = 0;
#pragma unroll 1
  for (int i = lane * 16; i < lane * 16 + 16; i += 4) {
    masses_at(i, x, mass);
    sum += mass[3];
  }
  uint64_t scan = sum;  // inclusive over the lanes
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t left = __shfl_up_sync(kAll, scan, offset);
    if (lane >= offset) scan += left;
  }
  uint64_t before = scan - sum;
  if (at < before || at >= scan) return;
#pragma unroll 1
  for (int i = lane * 16; i < lane * 16 + 16; i += 4) {
    masses_at(i, x, mass);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (at >= before + (e ? mass[e - 1] : 0) && at < before + mass[e]) {
        work.hit = static_cast<uint64_t>(__float_as_uint(x[e])) << 32 | row.id(first + i + e);
      }
    }
    before += mass[3];
  }
}

// The same in the CTA's slice, after sum_masses.
template <class T, int kThreads>
__device__ void locate(SampleWork<T, kThreads>& work, const Filter& filter, uint64_t at) {
  int w = 0;
  for (; at >= work.warp_mass[w]; ++w) at -= work.warp_mass[w];
  const Row<T, kThreads> row = work.row;
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int c = warp; c < row.chunks_of(w); c += kThreads / 32) {
    uint64_t sum = 0;
    row.visit(w, c, [&](int i, const float (&x)[4]) {
      uint64_t mass[4];
      filter.masses(x, row.id(i), mass);
      sum += mass[3];
    });
    sum = warp_all(sum, Sum());
    if (threadIdx.x % 32 == 0) work.chunk_mass[c] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    int c = 0;
    for (; at >= work.chunk_mass[c]; ++c) at -= work.chunk_mass[c];
    pick(work, filter, w, c, at);
  }
  __syncthreads();
}

// A draw from the whole row (limit 0) or its tokens at or before `limit`; CTA 0 or the CTA that holds the token writes it.
template <class T, int kThreads>
__device__ void draw_from_row(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, uint64_t limit) {
  const float share = work.set.share, least = work.set.least();
  Filter filter{work.scale,
                limit ? value_of(limit) : -INFINITY,
                limit ? static_cast<int>(id_of(limit)) : INT32_MAX,
                share < 1.f ? -INFINITY : least,
                false,
                work.set.k != 0};
  filter.all = limit == 0 && filter.floor == -INFINITY;
  uint64_t target = 0;
  for (uint32_t round = 0;; ++round) {
    const uint64_t total = sum_masses(work, cluster, filter);
    if (round == 0) {
      target = work.set.target(total);
    } else if (total < target && filter.scale.log2_weight(filter.logit) >= least) {
      if (cluster.rank() == 0 && threadIdx.x == 0) *work.out = filter.id + 1;
      return;
    }
    uint64_t at = __umul64hi(random_bits(work.set.stream, round), total);
    uint32_t owner = 0;
    for (; at >= cluster.slot(kMassSlot, owner).a; ++owner) at -= cluster.slot(kMassSlot, owner).a;
    if (owner == cluster.rank()) locate(work, filter, at);
    if (!(share < 1.f)) {
      if (owner == cluster.rank() && threadIdx.x == 0) *work.out = static_cast<int32_t>(work.hit);
      return;
    }
    cluster.publish(kDrawnSlot, {work.hit, 0});
    const uint64_t hit = cluster.slot(kDrawnSlot, owner).a;
    filter.logit = __uint_as_float(static_cast<uint32_t>(hit >> 32));
    filter.id = static_cast<int>(static_cast<uint32_t>(hit)) - 1;
    filter.floor = least;
    filter.all = false;
  }
}

// The first k of the n tokens of the list, and what is ahead of each: work.hit_place is the last, the sum of their masses comes back.
template <class T, int kThreads>
__device__ uint64_t rank_list(SampleWork<T, kThreads>& work, uint32_t n) {
  const uint32_t lane = threadIdx.x % 32, k = work.set.k;
#pragma unroll 1
  for (uint32_t i = threadIdx.x / 32; i < n; i += kThreads / 32) {
    const uint64_t mine = work.items[i];
    uint32_t count = 0;
    uint64_t mass = 0;
    for (uint32_t j = lane; j < n; j += 32) {
      const bool ahead = work.items[j] > mine;
      count += ahead;
      mass += ahead ? work.item_mass[j] : 0u;
    }
    count = __reduce_add_sync(kAll, count);
    mass = warp_all(mass, Sum());
    if (lane != 0) continue;
    work.item_ahead[i] = mass;
    if (count + 1 == k) {
      work.hit_place = mine;
      work.hit_before = mass + work.item_mass[i];
    }
  }
  __syncthreads();
  return work.hit_before;
}

// The same draw as draw_from_row, on the list that CTA 0 has.
template <class T, int kThreads>
__device__ int draw_from_list(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, uint32_t n) {
  const uint64_t target = work.set.target(rank_list(work, n));
  const float share = work.set.share, least = work.set.least();
  const Scale scale = work.scale;
  const uint32_t lane = threadIdx.x % 32;
  uint64_t limit = work.hit_place;
  float floor = share < 1.f ? -INFINITY : least;
  for (uint32_t round = 0;; ++round) {
    const auto mass_of = [&](uint32_t i, uint64_t place) {
      return place >= limit && scale.log2_weight(value_of(place)) >= floor ? work.item_mass[i] : 0u;
    };
    uint64_t total = 0;
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) total += mass_of(i, work.items[i]);
    total = cluster.block_all(total, Sum());
    const uint64_t at = __umul64hi(random_bits(work.set.stream, round), total);
#pragma unroll 1
    for (uint32_t i = threadIdx.x / 32; i < n; i += kThreads / 32) {
      const uint64_t place = work.items[i];
      const uint32_t mine = mass_of(i, place), id = id_of(place);
      if (mine == 0) continue;
      uint64_t before = 0;
      for (uint32_t j = lane; j < n; j += 32) {
        const uint64_t other = work.items[j];
        if (id_of(other) < id) before += mass_of(j, other);
      }
      before = warp_all(before, Sum());
      if (lane == 0 && at >= before && at < before + mine) work.hit = i;
    }
    __syncthreads();
    const uint32_t hit = static_cast<uint32_t>(work.hit);
    const uint64_t place = work.items[hit];
    const bool large = scale.log2_weight(value_of(place)) >= least;
    if (large && work.item_ahead[hit] < target) return static_cast<int>(id_of(place));
    limit = place + 1;
    floor = least;
  }
}

template <class T, int kThreads>
__device__ void greedy_token(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, float own) {
  const Row<T, kThreads> row = work.row;
  const float most = cluster.block_all(own, MaxNan());
  const bool finite = isfinite(most) || (most == INFINITY && cluster.block_all(row.any_finite() ? 1 : 0, Max()) != 0);
  uint32_t id = 0xffffffffu;
  const bool active = own == most;
  if (__any_sync(kAll, active)) {
    row.for_each(
        [&](int i, const float (&x)[4]) {
          if (!active || Row<T, kThreads>::max_of(x) < most) return;
#pragma unroll
          for (int e = 0; e < 4; ++e) id = x[e] == most && row.inside(i + e) ? min(id, row.id(i + e)) : id;
        },
        active);
  }
  id = cluster.block_all(id, Min());
  if (!cluster.deliver({__float_as_uint(most) | (finite ? 1ull << 32 : 0), id})) return;
  float top = -INFINITY;
  bool any = false;
  int token = -1;
  for (uint32_t r = 0; r < cluster.size(); ++r) {  // ids rise with r: the first CTA that holds the maximum wins
    const Slot slot = cluster.slot(kLastSlot, r);
    const float theirs = __uint_as_float(static_cast<uint32_t>(slot.a));
    any |= slot.a >> 32;
    if (theirs > top) token = static_cast<int>(slot.b);
    top = max_nan(top, theirs);
  }
  if (threadIdx.x == 0) *work.out = any && !isnan(top) ? token : -1;
}

template <class T, int kThreads>
__device__ void drawn_token(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, float own) {
  const uint32_t k = work.set.k;
  const Top top = exchange_top(cluster, work.row, own, k <= kBrief<kThreads> ? k : 0);
  if (!top.valid) {
    if (cluster.rank() == 0 && threadIdx.x == 0) *work.out = -1;
    return;
  }
  if (threadIdx.x == 0) {
    work.scale = {top.max, work.set.inverse()};
    work.low = top.low;
  }
  __syncthreads();
  uint64_t limit = 0;
  if (k) {
    Selector<T, kThreads> selector(work, cluster, own);
    if (const uint32_t n = selector.shortlist(k)) {
      if (cluster.rank() != 0) return;
      const int token = draw_from_list(work, cluster, n);
      if (threadIdx.x == 0) *work.out = token;
      return;
    }
    limit = selector.place_of_kth(k);
  }
  draw_from_row(work, cluster, limit);
}

// grid: rows * cluster; dynamic shared memory: SampleWork, then `held` tokens.
template <class T, int kThreads>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void sample_tokens_kernel(SampleTokensParams p, int slice, int held) {
  extern __shared__ __align__(16) unsigned char smem[];
  auto& work = *reinterpret_cast<SampleWork<T, kThreads>*>(smem);
  Cluster<kThreads> cluster(work.exchange);
  cluster_arrive();
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
    work.set = set;
    work.out = p.tokens + at;
  }
  pdl_trigger();
  cluster_wait();  // every CTA of the cluster runs: its shared memory may be written
  __syncthreads();
  if (work.set.greedy()) {
    greedy_token(work, cluster, own);
  } else {
    drawn_token(work, cluster, own);
  }
}

}  // namespace pyllm::sampling
