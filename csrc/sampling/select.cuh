// Exact selection on a row held by a cluster: the k first tokens in the total order (logit descending, id ascending).
// Usual case, k <= kBrief: the tokens that reach a bound taken from the threads' maxima (row.cuh) are few, and are sent to CTA 0.
// Else a radix descent finds the k-th token's place: histogram -> bin that holds it -> gather that bin's tokens (at most kItems, else
// descend again) -> every warp of the cluster ranks some of them against all.
//   level 1    linear in the logit below the maximum: real rows spread over many bins there, while the top bits of a float put most of
//              a row into a handful of bins and serialise the atomics;
//   level 2..  bits of the order key inside the bin, then (equal logits) bits of the id.
#pragma once
#include "sampling/row.cuh"

namespace pyllm::sampling {

constexpr int kBins = 1024;
constexpr int kItems = 576;  // candidates that are ranked pairwise
constexpr float kLog2e = 1.44269504088896f;
constexpr float kMassUnit = 0x1p31f;   // per token
constexpr float kTotalUnit = 0x1p40f;  // per four tokens, where no top-k cuts the row

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Weights of a row: w = 2^log2_weight(x), 1 at the maximum. A maximum of +inf shares all weight among its equals: inf - inf = NaN, and
// fminf(NaN, 0) = 0.
struct Scale {
  float top, inverse;  // log2(e) / temperature
  __device__ __forceinline__ float log2_weight(float x) const { return fminf(__fmul_rn(__fsub_rn(x, top), inverse), 0.f); }
  __device__ __forceinline__ float weight(float x) const { return exp2_fast(log2_weight(x)); }
  // The same where the maximum is finite.
  __device__ __forceinline__ float finite_log2_weight(float x) const { return __fmul_rn(__fsub_rn(x, top), inverse); }
  __device__ __forceinline__ uint32_t mass(float x) const { return __float2uint_rn(weight(x) * kMassUnit); }
};

// Adds numbers of [0, 4] as integers, each rounded to a multiple of 2^-40, bit for bit as __float2ull_rn(x * 2^40) would: 64-bit
// conversions share the unit that evaluates exp2 and would take a third of its time. Adding 12 leaves the multiple of 2^-20 in the low
// bits, adding 1.5 * 2^-17 to the rest that of 2^-40. 512 numbers at most (a row of 2^20 in one CTA of 512 threads).
class FixedSum {
 public:
  __device__ __forceinline__ void add(float x) {
    const float high = __fadd_rn(x, kHigh);
    const float low = __fadd_rn(__fsub_rn(x, __fsub_rn(high, kHigh)), kLow);
    high_ += __float_as_uint(high);
    low_ += __float_as_uint(low);
  }
  __device__ __forceinline__ uint64_t total(uint32_t numbers) const {
    const uint32_t high = high_ - numbers * __float_as_uint(kHigh), low = low_ - numbers * __float_as_uint(kLow);
    return (static_cast<uint64_t>(high) << 20) + static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(low)));
  }

 private:
  static constexpr float kHigh = 12.f, kLow = 0x1.8p-17f;
  uint32_t high_ = 0, low_ = 0;
};

// x >= of(id) for x > logit, or x == logit and id <= last.
struct Limits {
  float logit, above;
  int last;
  __device__ static Limits make(float logit, int last) {
    return {logit, from_order_key(order_key(logit) + 1), last};  // for +inf: NaN, which nothing reaches
  }
  __device__ __forceinline__ float of(int id) const { return id <= last ? logit : above; }
  // For the tokens id ... id + 3, in fewer instructions.
  __device__ __forceinline__ void of(int id, float (&limit)[4]) const {
    const float all = of(id + 3);
#pragma unroll
    for (int e = 0; e < 4; ++e) limit[e] = all;
    if (static_cast<uint32_t>(last - id) < 3u) {
#pragma unroll
      for (int e = 0; e < 3; ++e) limit[e] = of(id + e);
    }
  }
};

// The tokens that are still undecided, and their bins; bin 0 comes first in the order, -1 is outside.
struct Region {
  enum Kind { kLinear, kBelow, kKeys, kIds } kind;
  Scale scale;
  float floor, slope;                   // kLinear: log2 weights in [floor, 0]; kBelow: everything under floor
  uint32_t first_key, last_key, shift;  // kKeys: keys from first_key down to last_key; kIds: key == first_key
  uint32_t first_id;

  __device__ static Region linear(const Scale& scale, float range) {
    range = fminf(range, 1e30f);
    return {kLinear, scale, -range, range > 0.f ? fminf((kBins - 1) / range, 1e30f) : 0.f, 0, 0, 0, 0};
  }
  // All tokens whose key is at least last: bins 0 and 1.
  __device__ static Region keys_from(const Scale& scale, uint32_t last) { return {kKeys, scale, 0.f, 0.f, 0xffffffffu, last, 31, 0}; }
  // What is left after the gathered bin, whose keys span [last, first], turned out to hold too many tokens.
  __device__ Region narrow(int bin, uint32_t first, uint32_t last) const {
    Region r = *this;
    if (kind == kIds) {  // two levels of ids cover V <= 2^20
      r.first_id = first_id + (static_cast<uint32_t>(bin) << shift);
      r.shift = 0;
      return r;
    }
    r.kind = first == last ? kIds : kKeys;
    r.first_key = first;
    r.last_key = last;
    r.first_id = 0;
    r.shift = first == last ? 10 : max(22 - __clz(first - last), 0);
    return r;
  }
  __device__ __forceinline__ int bin(float x, uint32_t id) const {
    if (kind <= kBelow) {
      const float y = scale.log2_weight(x);
      if (kind == kBelow) return y >= floor ? -1 : 0;
      return y >= floor ? min(__float2int_rn(y * -slope), kBins - 1) : -1;
    }
    const uint32_t key = order_key(x);
    if (key > first_key || key < last_key) return -1;
    if (kind == kKeys) return static_cast<int>((first_key - key) >> shift);
    const uint32_t at = (id - first_id) >> shift;  // ids below first_id wrap to huge values
    return at < kBins ? static_cast<int>(at) : -1;
  }
  // May a token <= x lie in bins 0 ... last? (x: the largest of a vector)
  __device__ __forceinline__ bool reaches(float x, int last) const {
    if (kind == kBelow) return true;
    if (kind == kLinear) {
      const float y = scale.log2_weight(x);
      return y >= floor && __float2int_rn(y * -slope) <= last;
    }
    return order_key(x) >= last_key;
  }
};

// The state of one row in shared memory. Row, scale and region live here rather than in registers: each pass copies what it needs, so that
// little is live across the barriers (64 registers keep 32 warps on an SM).
template <class T, int kThreads>
struct Work {
  Exchange exchange;
  union {  // each member's use ends, with a barrier, before that of another begins
    uint32_t keys[kThreads];
    struct {
      uint32_t counts[kBins];
      uint64_t merged[kBins];
    };
    struct {
      uint64_t found[kItems];  // this CTA's candidates; in CTA 0 then the list in the order of ids
      uint64_t items[kItems];
      uint32_t item_mass[kItems];
    };
  };
  uint64_t target, before;  // what count to reach, and how many tokens are ahead of the region
  uint64_t hit_place, hit_before;
  uint16_t queues[kThreads / 32][64];  // Row::for_each_from
  int hit_bin;
  uint32_t found_count, first_key, last_key;
  Row<T, kThreads> row;
  Scale scale;
  float low;  // logit that the k-th token reaches, if the bound is not just a guess
  Region region;
};

// Up to here k gets a bound from the threads' maxima (Top::low) and a shortlist.
template <int kThreads>
constexpr int kBrief = kItems / 2 < kThreads ? kItems / 2 : kThreads;

template <class T, int kThreads>
class Selector {
 public:
  using W = Work<T, kThreads>;
  static constexpr int kStep = Row<T, kThreads>::kStep;
  static constexpr int kWarps = kThreads / 32;

  // work.row, scale and low are set.
  __device__ Selector(W& work, Cluster<kThreads>& cluster) : work_(work), cluster_(cluster) {}

  // Lists this CTA's tokens that reach work.low in work.found, if they fit; how many, behind the next barrier, is
  // work.found_count, which was 0.
  __device__ void find_reaching() {
    const float low = work_.low;
    const auto row = work_.row;
    uint64_t* const found = cluster_.size() > 1 ? work_.found : work_.items;
    row.for_each_from(low, work_.queues, [&](int i, const float (&x)[kStep]) {
      if (Row<T, kThreads>::max_of(x) < low) return;
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        if (x[e] < low || !row.inside(i + e)) continue;
        const uint32_t at = atomicAdd(&work_.found_count, 1u);
        if (at < kItems) found[at] = place_of(x[e], row.id(i + e));
      }
    });
  }

  // The found tokens of all CTAs into CTA 0's work.items; how many. 0 if they do not fit. Where it is not 0, only CTA 0 may use the cluster
  // again. ahead: how many the CTAs before this one found, all: how many there are.
  __device__ uint32_t collect(uint32_t ahead, uint32_t all) {
    if (all > kItems) return 0;
    if (cluster_.size() == 1) return all;
    const uint32_t n = work_.found_count;
    for (uint32_t i = threadIdx.x; i < n; i += kThreads) send(&work_.items[ahead + i], cluster_.ready(kList), 0, work_.found[i]);
    if (cluster_.rank() == 0) {
      if (threadIdx.x == 0) cluster_.expect(kList, all * sizeof(uint64_t));
      cluster_.wait(kList);
    }
    return all;
  }

  // The tokens that reach work.low, a bound that k tokens reach, as collect().
  __device__ uint32_t shortlist() {
    find_reaching();
    cluster_.publish(kGatherSlot, [&] { return Slot{work_.found_count, 0}; });
    const uint32_t theirs = static_cast<uint32_t>(cluster_.lane_slot(kGatherSlot).a);
    const uint32_t all = __reduce_add_sync(kAll, theirs);
    return collect(__reduce_add_sync(kAll, threadIdx.x % 32 < cluster_.rank() ? theirs : 0u), all);
  }

  // The place of the k-th token, 0 < k < V.
  __device__ uint64_t place_of_kth(uint32_t k) {
    if (threadIdx.x == 0) {
      work_.target = k;
      work_.before = 0;
    }
    const float range = fminf(-work_.scale.log2_weight(work_.low), 1e30f);
    set_region(Region::linear(work_.scale, range));
    for (bool top_level = true;; top_level = false) {
      fill_histogram();
      const int bin = find();
      if (threadIdx.x == 0) work_.before += work_.hit_before;
      if (bin < 0) {
        if (!top_level) return 0;
        set_below();
      }
      const uint32_t n = gather(max(bin, 0), max(bin, 0), 0);
      if (n <= kItems) return resolve(n);
      set_region(work_.region.narrow(max(bin, 0), work_.first_key, work_.last_key));
    }
  }

  // All tokens at or before `place` into work.items; how many.
  __device__ uint32_t gather_from(uint64_t place) {
    set_region(Region::keys_from(work_.scale, static_cast<uint32_t>(place >> 32)));
    return gather(0, 1, place);
  }

 private:
  __device__ void set_region(const Region& region) {
    __syncthreads();
    if (threadIdx.x == 0) work_.region = region;
    __syncthreads();
  }
  __device__ void set_below() {
    __syncthreads();
    if (threadIdx.x == 0) work_.region.kind = Region::kBelow;
    __syncthreads();
  }

  // The item at which the count reaches the target: each warp of the cluster compares some items with all.
  __device__ uint64_t resolve(uint32_t n) {
    if (threadIdx.x == 0) work_.hit_place = 0;
    __syncthreads();
    const uint64_t target = work_.target, before = work_.before;
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = cluster_.rank() * kWarps + threadIdx.x / 32; i < n; i += cluster_.size() * kWarps) {
      const uint64_t mine = work_.items[i];
      uint32_t ahead = 0;
      for (uint32_t j = lane; j < n; j += 32) ahead += work_.items[j] > mine;
      ahead = __reduce_add_sync(kAll, ahead);
      if (lane == 0 && before + ahead + 1 == target) work_.hit_place = mine;
    }
    __syncthreads();
    cluster_.publish(kCountSlot, [&] { return Slot{work_.hit_place, 0}; });
    uint64_t hit = 0;
    for (uint32_t r = 0; r < cluster_.size(); ++r) hit = max(hit, cluster_.slot(kCountSlot, r).a);
    return hit;
  }

  // Adds one token per lane (bin -1: none). Equal bins in a whole warp (ties, flat rows) become one atomic.
  __device__ void add(int bin) {
    const int leader = __shfl_sync(kAll, bin, 0);
    if (__all_sync(kAll, bin == leader)) {
      if (leader >= 0 && threadIdx.x % 32 == 0) atomicAdd(&work_.counts[bin], 32u);
      return;
    }
    if (bin >= 0) atomicAdd(&work_.counts[bin], 1u);
  }

  // One pass over the slice.
  __device__ void fill_histogram() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) work_.counts[i] = 0;
    __syncthreads();
    const Region region = work_.region;
    const auto row = work_.row;
    row.for_each_four([&](int i, const float (&x)[kStep]) {
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const int bin = row.inside(i + e) ? region.bin(x[e], row.id(i + e)) : -1;
        if (__any_sync(kAll, bin >= 0)) add(bin);
      }
    });
    cluster_sync();
  }

  // Merges the cluster's histograms, each CTA one segment of the bins for all, and finds the bin where work.before + sum reaches
  // work.target. work.hit_before: count or mass of the bins ahead of it; of all bins if none does (-1).
  __device__ int find() {
    const uint32_t segment = kBins / cluster_.size();
    for (uint32_t i = threadIdx.x; i < segment; i += kThreads) {
      const uint32_t bin = cluster_.rank() * segment + i;
      uint64_t sum = 0;
#pragma unroll 4
      for (uint32_t r = 0; r < cluster_.size(); ++r) {
        sum += load_peer(&work_.counts[bin], r);
      }
#pragma unroll 4
      for (uint32_t r = 0; r < cluster_.size(); ++r) store_peer(&work_.merged[bin], r, sum);
    }
    if (threadIdx.x == 0) work_.hit_bin = -1;
    cluster_sync();

    constexpr int kPer = kBins / kThreads;
    uint64_t own[kPer], sum = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum += own[i] = work_.merged[threadIdx.x * kPer + i];
    const uint64_t scan = warp_scan(sum);
    uint64_t* const parts = work_.exchange.parts[0];
    __syncthreads();  // the parts of a reduction have been read
    if (threadIdx.x % 32 == 31) parts[threadIdx.x / 32] = scan;
    __syncthreads();
    const uint64_t target = work_.target, before = work_.before;
    uint64_t ahead = scan - sum;
    for (uint32_t w = 0; w < threadIdx.x / 32; ++w) ahead += parts[w];
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (before + ahead < target && target <= before + ahead + own[i]) {
        work_.hit_bin = threadIdx.x * kPer + i;
        work_.hit_before = ahead;
      }
      ahead += own[i];
    }
    if (threadIdx.x == kThreads - 1 && before + ahead < target) work_.hit_before = ahead;
    __syncthreads();
    return work_.hit_bin;
  }

  // Collects the tokens of bins [first, last] at or before `cut` from all CTAs into every CTA's work.items (if they fit).
  // Their number is returned, and the span of their keys left in work.
  __device__ uint32_t gather(int first, int last, uint64_t cut) {
    if (threadIdx.x == 0) work_.found_count = 0;
    __syncthreads();
    uint32_t high = 0, low = 0xffffffffu;
    const Region region = work_.region;
    const auto row = work_.row;
    row.for_each_four([&](int i, const float (&x)[kStep]) {
      if (!__any_sync(kAll, region.reaches(Row<T, kThreads>::max_of(x), last))) return;
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const uint32_t id = row.id(i + e);
        const int bin = row.inside(i + e) ? region.bin(x[e], id) : -1;
        const uint64_t place = place_of(x[e], id);
        const bool take = bin >= first && bin <= last && bin >= 0 && place >= cut;
        if (take) {
          high = max(high, static_cast<uint32_t>(place >> 32));
          low = min(low, static_cast<uint32_t>(place >> 32));
        }
        append(take, place);
      }
    });
    const Span span = cluster_.block_span(low, high);
    cluster_.publish(kGatherSlot, [&] { return Slot{work_.found_count, static_cast<uint64_t>(span.max) << 32 | span.min}; });
    if (cluster_.size() > 1) cluster_sync();  // peers' lists are read
    return pull();
  }

  __device__ __forceinline__ void append(bool take, uint64_t place) {
    const uint32_t takers = __ballot_sync(kAll, take);
    if (takers == 0) return;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t at = lane == 0 ? atomicAdd(&work_.found_count, __popc(takers)) : 0;
    at = __shfl_sync(kAll, at, 0) + __popc(takers & ((1u << lane) - 1));
    if (take && at < kItems) work_.found[at] = place;
  }

  __device__ uint32_t pull() {
    uint32_t count = 0, high = 0, low = 0xffffffffu;
    for (uint32_t r = 0; r < cluster_.size(); ++r) {
      const Slot slot = cluster_.slot(kGatherSlot, r);
      count += static_cast<uint32_t>(slot.a);
      high = max(high, static_cast<uint32_t>(slot.b >> 32));
      low = min(low, static_cast<uint32_t>(slot.b));
    }
    if (threadIdx.x == 0) {
      work_.first_key = high;
      work_.last_key = low;
    }
    if (count > kItems) return count;
    // One warp per peer: the remote reads of all peers are in flight together.
    for (uint32_t r = threadIdx.x / 32; r < cluster_.size(); r += kWarps) {
      uint32_t at = 0;
      for (uint32_t s = 0; s < r; ++s) at += static_cast<uint32_t>(cluster_.slot(kGatherSlot, s).a);
      const uint32_t n = static_cast<uint32_t>(cluster_.slot(kGatherSlot, r).a);
      for (uint32_t i = threadIdx.x % 32; i < n; i += 32) {
        work_.items[at + i] = load_peer(&work_.found[i], r);
      }
    }
    __syncthreads();
    return count;
  }

  W& work_;
  Cluster<kThreads>& cluster_;
};

}  // namespace pyllm::sampling
