// Exact selection on a row held by a cluster: the k-th token, or the token where probability mass reaches a target, in the total order
// (logit descending, id ascending), as its `place`. Radix descent: histogram -> bin that holds the answer -> gather that bin's tokens
// (at most kItems, else descend again) -> every warp of the cluster ranks some of them against all. Counts and 2^-31 fixed-point masses
// are integers, so the answer depends neither on the order of atomics nor on the cluster size.
//   level 1    linear in the logit below the maximum: real rows spread over many bins there, while the top bits of a float put most of
//              a row into a handful of bins and serialise the atomics;
//   level 2..  bits of the order key inside the bin, then (equal logits) bits of the id.
// A filter on thread maxima (shortlist) makes the usual small top-k skip level 1 for all but one token per thread.
#pragma once
#include "sampling/row.cuh"

namespace pyllm::sampling {

constexpr int kBins = 1024;
constexpr int kItems = 576;      // candidates that are ranked pairwise: 576^2 / 8 CTAs = 41k pairs, ~1 us; and 4 CTAs fit an SM
constexpr float kWindow = 20.f;  // level 1 of a mass descent looks at tokens down to 2^-20 of the largest
constexpr float kLog2e = 1.44269504088896f;
constexpr float kMassUnit = 0x1p31f;   // per token
constexpr float kTotalUnit = 0x1p40f;  // per four tokens, when the whole row is summed

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
  __device__ __forceinline__ uint32_t mass(float x) const { return __float2uint_rn(weight(x) * kMassUnit); }
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
  uint32_t low[kBins], high[kBins];  // masses in 16-bit halves: shared memory adds 32-bit words natively, 64-bit ones by a CAS loop
  union {                            // never alive together: `merged` is read before `found` is written, with a barrier between
    uint64_t merged[kBins];
    uint64_t found[kItems];
  };
  uint64_t items[kItems];
  uint32_t item_mass[kItems];
  uint64_t target, before;  // of the query: what to reach, and what the tokens ahead of the region weigh
  uint64_t hit_place, hit_before;
  int hit_bin;
  uint32_t found_count, first_key, last_key;
  Row<T, kThreads> row;
  Scale scale;
  float range;  // log2 weights, from the row's maximum down to the smallest maximum of a thread
  Region region;
};

template <class T, int kThreads>
class Selector {
 public:
  using W = Work<T, kThreads>;
  static constexpr int kStep = Row<T, kThreads>::kStep;
  static constexpr int kWarps = kThreads / 32;

  // own: the maximum of this thread's tokens, and a bound on those it meets in later passes. work.row, scale and range are set.
  __device__ Selector(W& work, Cluster<kThreads>& cluster, typename Row<T, kThreads>::Staged own)
      : work_(work), cluster_(cluster), own_(own) {}

  struct Cut {
    uint64_t place;   // the last token that stays; 0: all stay
    uint32_t listed;  // work.items[0, listed) hold all tokens that stay (and others); 0: no list
  };

  // The first k tokens (k = 0: all), and of those the fewest that reach `share` (in shared memory) of their mass (1: all). One loop, so
  // that each pass is compiled once: the code of a cold launch is fetched from L2.
  __device__ Cut select(uint32_t k, const float& share) {
    Cut cut{0, 0};
    for (int query = k ? 0 : 1; query < (share < 1.f ? 2 : 1); ++query) {
      const bool by_mass = query == 1;
      const uint64_t target = by_mass && cut.listed ? share_of(share, listed_mass(cut), 1.0) : k;
      if (threadIdx.x == 0) {
        work_.target = target;
        work_.before = 0;
      }
      const uint32_t n = cut.listed ? cut.listed : candidates(by_mass, k, share, cut);
      const uint64_t hit = n ? resolve(n, by_mass, cut.place, by_mass ? kShareSlot : kCountSlot) : 0;
      cut.place = max(cut.place, hit);
    }
    return cut;
  }

  // All tokens at or before `place` into work.items; how many.
  __device__ uint32_t gather_from(uint64_t place) {
    set_region(Region::keys_from(work_.scale, static_cast<uint32_t>(place >> 32)));
    return gather(0, 1, place);
  }

 private:
  // Few tokens, in work.items, one of which answers the query, all tokens that precede them weighing work.before; 0 if none does.
  __device__ uint32_t candidates(bool by_mass, uint32_t k, const float& share, Cut& cut) {
    // The k-th largest of the threads' maxima bounds the k-th token from below: usually ~k tokens are left above it.
    bool brief = !by_mass && k <= kItems / 2;
    set_region(Region::linear(work_.scale, by_mass ? fminf(kWindow, 2.5f * work_.range) : work_.range));
    for (int level = 1;;) {
      const uint64_t total = brief ? fill_maxima() : fill_histogram(by_mass, level == 1, cut.place);
      if (threadIdx.x == 0 && by_mass && level == 1) {
        work_.target = share_of(share, total, cut.place ? 1.0 : static_cast<double>(kMassUnit / kTotalUnit));
      }
      const int bin = find();
      if (bin < 0 && brief) {
        brief = false;
        continue;
      }
      if (threadIdx.x == 0 && !brief) work_.before += work_.hit_before;
      if (bin < 0) {
        if (level > 1) return 0;
        set_below();
      }
      const uint32_t n = gather(brief ? 0 : max(bin, 0), max(bin, 0), cut.place);
      if (n <= kItems) {
        if (brief) cut.listed = n;
        return n;
      }
      if (!brief) {
        set_region(work_.region.narrow(max(bin, 0), work_.first_key, work_.last_key));
        ++level;
      }
      brief = false;
    }
  }

  __device__ static uint64_t share_of(float share, uint64_t total, double unit) {
    const double target = ceil(static_cast<double>(share) * (static_cast<double>(total) * unit));
    return target > 1.0 ? static_cast<uint64_t>(target) : 1;
  }

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

  __device__ uint64_t listed_mass(const Cut& cut) {
    uint64_t mass = 0;
    for (uint32_t i = threadIdx.x; i < cut.listed; i += kThreads) mass += work_.items[i] >= cut.place ? work_.item_mass[i] : 0u;
    return cluster_.block_all(mass, Sum());
  }

  __device__ uint64_t fill_maxima() {
    clear_histogram();
    const int bin = work_.region.bin(own_.max, 0);
    if (bin >= 0) atomicAdd(&work_.low[bin], 1u);
    cluster_.publish(kFillSlot, {0, 0});
    return 0;
  }

  // The item at which count or mass reaches the target: each warp of the cluster compares some items with all.
  __device__ uint64_t resolve(uint32_t n, bool by_mass, uint64_t cut, int slots) {
    if (threadIdx.x == 0) work_.hit_place = 0;
    __syncthreads();
    const uint64_t target = work_.target, before = work_.before;
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t i = cluster_.rank() * kWarps + threadIdx.x / 32; i < n; i += cluster_.size() * kWarps) {
      const uint64_t mine = work_.items[i];
      if (mine < cut) continue;
      uint64_t ahead = 0;
      for (uint32_t j = lane; j < n; j += 32) {
        if (work_.items[j] > mine) ahead += by_mass ? work_.item_mass[j] : 1u;
      }
      ahead = before + warp_all(ahead, Sum());
      if (lane == 0 && ahead < target && target <= ahead + (by_mass ? work_.item_mass[i] : 1u)) work_.hit_place = mine;
    }
    __syncthreads();
    cluster_.publish(slots, {work_.hit_place, 0});
    uint64_t hit = 0;
    for (uint32_t r = 0; r < cluster_.size(); ++r) hit = max(hit, cluster_.slot(slots, r).a);
    return hit;
  }

  __device__ void clear_histogram() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) work_.low[i] = work_.high[i] = 0;
    __syncthreads();
  }

  // Adds one token per lane (bin -1: none). Equal bins in a whole warp (ties, flat rows) become one atomic.
  __device__ void add(int bin, uint32_t value) {
    const int leader = __shfl_sync(kAll, bin, 0);
    if (__all_sync(kAll, bin == leader)) {
      if (leader < 0) return;
      const uint32_t low = __reduce_add_sync(kAll, value & 0xffffu), high = __reduce_add_sync(kAll, value >> 16);
      if (threadIdx.x % 32 != 0) return;
      // low < 2^21 here: keep the 16-bit split, so that 65536 tokens cannot overflow a word
      atomicAdd(&work_.low[bin], low & 0xffffu);
      atomicAdd(&work_.high[bin], high + (low >> 16));
      return;
    }
    if (bin < 0) return;
    if (value & 0xffffu) atomicAdd(&work_.low[bin], value & 0xffffu);
    if (value >> 16) atomicAdd(&work_.high[bin], value >> 16);
  }

  // One pass over the slice; publishes, and returns the cluster's mass of all tokens at or before `cut` (if want_total): whole rows in
  // kTotalUnit (fp32 within four tokens, integers beyond), rows with a cut in kMassUnit, so that every path sums the same numbers.
  __device__ uint64_t fill_histogram(bool by_mass, bool want_total, uint64_t cut) {
    clear_histogram();
    uint64_t total = 0;
    const Region region = work_.region;
    const auto row = work_.row;
    row.for_each([&](int i, const float (&x)[kStep]) {
      float sum = 0.f;
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        const uint32_t id = row.id(i + e);
        const bool kept = row.inside(i + e) && (cut == 0 || place_of(x[e], id) >= cut);
        const int bin = kept ? region.bin(x[e], id) : -1;
        const float w = by_mass ? region.scale.weight(x[e]) : 0.f;
        sum += w;
        const bool precise = by_mass && kept && (bin >= 0 || cut != 0);
        const uint32_t value = precise ? __float2uint_rn(w * kMassUnit) : 1u;
        if (precise && cut != 0) total += value;
        if (__any_sync(kAll, bin >= 0)) add(bin, value);
      }
      if (want_total && cut == 0) total += __float2ull_rn(sum * kTotalUnit);
    });
    total = want_total && by_mass ? cluster_.block_all(total, Sum()) : 0;
    cluster_.publish(kFillSlot, {total, 0});
    total = 0;
    for (uint32_t r = 0; r < cluster_.size(); ++r) total += cluster_.slot(kFillSlot, r).a;
    return total;
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
        sum += load_peer(&work_.low[bin], r) + (static_cast<uint64_t>(load_peer(&work_.high[bin], r)) << 16);
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
    uint64_t scan = sum;  // inclusive over the warp
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint64_t left = __shfl_up_sync(kAll, scan, offset);
      if (threadIdx.x % 32 >= offset) scan += left;
    }
    uint64_t* parts = work_.exchange.parts;
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
    if (__any_sync(kAll, region.reaches(own_.bound, last))) {
      const auto row = work_.row;
      row.for_each([&](int i, const float (&x)[kStep]) {
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
    }
    const uint64_t keys = static_cast<uint64_t>(cluster_.block_all(high, Max())) << 32;
    low = cluster_.block_all(low, Min());
    cluster_.publish(kGatherSlot, {work_.found_count, keys | low});
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
    const Scale scale = work_.scale;
    // One warp per peer: the remote reads of all peers are in flight together.
    for (uint32_t r = threadIdx.x / 32; r < cluster_.size(); r += kWarps) {
      uint32_t at = 0;
      for (uint32_t s = 0; s < r; ++s) at += static_cast<uint32_t>(cluster_.slot(kGatherSlot, s).a);
      const uint32_t n = static_cast<uint32_t>(cluster_.slot(kGatherSlot, r).a);
      for (uint32_t i = threadIdx.x % 32; i < n; i += 32) {
        const uint64_t place = load_peer(&work_.found[i], r);
        work_.items[at + i] = place;
        work_.item_mass[at + i] = scale.mass(value_of(place));
      }
    }
    __syncthreads();
    return count;
  }

  W& work_;
  Cluster<kThreads>& cluster_;
  const typename Row<T, kThreads>::Staged own_;
};

}  // namespace pyllm::sampling
