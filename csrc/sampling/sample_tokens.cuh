// sample_tokens: one token per row of logits: temperature, top-k, top-p, min-p, then argmax of w_i / E_i over the kept tokens.
//
// One cluster of 1 ... 16 CTAs per row; every CTA reads its slice of the row once and keeps it in shared memory (row.cuh).
//   greedy       maximum and lowest id of each slice, one exchange.
//   plain        maximum (1 exchange), then every token races: Philox per 4 tokens, and per token 8 instructions that rule out nearly all
//                (E >= u is compared with what beats the best score so far); logarithms for the few that are left.
//   top-k        a shortlist of ~k candidates from the threads' maxima (3 exchanges), pairwise ranks (1), top-p on them (1), race on them.
//   top-p alone  mass histogram and exact cut (select.cuh, 5 exchanges), race over the row's kept tokens.
//   min-p alone  a threshold: as plain, noise for the kept tokens only.
// Estimates, V = 128256, one row (16 CTAs), us: launch 2, read 1.5, an exchange 0.3 (histogram merge 0.8), a pass over the slice 0.2:
// greedy 4, plain 5, top-k with top-p and min-p 7, top-p alone 8. 256 rows (8 CTAs each): read 14 (bf16) or 29 (fp32) at 4.6 TB/s;
// instructions per token 2 (top-k), 12 (top-p), 25 (plain), at ~1.15 us each over 132 SMs, overlapped by the 2-3 CTAs of an SM.
#pragma once
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
  __device__ bool greedy() const { return !(temperature > 0.f) || k == 1; }
  // Bounded on both sides, so that 0 * inverse and -inf * inverse are never NaN.
  __device__ float inverse() const { return fminf(kLog2e / fminf(temperature, 1e37f), 3e38f); }
  // Log2 weight under which a token is dropped: min-p, or too small to win even with the luckiest E against the maximum's worst.
  __device__ float least() const {
    const float never = kMinLog2Exponential - kMaxLog2Exponential;
    return min_p > 0.f ? fmaxf(log2f(fminf(min_p, 1.f)), never) : never;
  }
};

template <class T, int kThreads>
struct SampleWork : Work<T, kThreads> {
  Settings set;
  int32_t* out;
};

// The best (score, lowest id) as one integer: scores order like logits.
template <class T, int kThreads>
__device__ uint64_t race_row(const Row<T, kThreads>& shared_row, const Scale& scale, float least, uint64_t cut, const Stream& stream) {
  static_assert(Row<T, kThreads>::kStep == 4, "Philox gives four words");
  const Row<T, kThreads> row = shared_row;
  uint64_t best = 0;
  float bar = -kMaxLog2Exponential;  // the maximum's token, always kept, scores at least this
  row.for_each([&](int i, const float (&x)[4]) {
    const float floor = fmaxf(least, bar + kMinLog2Exponential);
    const float most = row.max_of(x);
    if (!__any_sync(kAll, scale.log2_weight(most) >= floor && order_key(most) >= cut >> 32)) return;
    const uint4 words = random_words(stream, row.id(i) / 4);
    const uint32_t r[4] = {words.x, words.y, words.z, words.w};
    uint32_t chances = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float y = scale.log2_weight(x[e]);
      const bool kept = y >= floor && (cut == 0 || place_of(x[e], row.id(i + e)) >= cut);
      // A win needs E < 2^(y - bar), and E >= u; the factor and 2^-22 cover the rounding of this filter.
      const float limit = fmaf(exp2_fast(y - bar), 1.001f, 1.f + 0x1p-22f);
      chances |= kept && one_plus_u_floor(r[e]) <= limit ? 1u << e : 0u;
    }
    bool better = false;
    for (; chances; chances &= chances - 1) {
      const int e = __ffs(chances) - 1;
      const float logit = e & 2 ? (e & 1 ? x[3] : x[2]) : (e & 1 ? x[1] : x[0]);
      const uint64_t place = place_of(scale.log2_weight(logit) - log2_exponential(word_of(words, e)), row.id(i + e));
      better |= place > best;
      best = max(best, place);
    }
    if (__any_sync(kAll, better)) {  // the warp shares its best score: the filter tightens for all lanes
      const uint32_t key = __reduce_max_sync(kAll, static_cast<uint32_t>(best >> 32));
      bar = fmaxf(bar, from_order_key(key));
    }
  });
  return best;
}

// The same race among work.items.
template <class T, int kThreads>
__device__ __forceinline__ uint64_t race_items(const Work<T, kThreads>& work, uint32_t n, const Scale& scale, float least, uint64_t cut,
                                               const Stream& stream) {
  uint64_t best = 0;
  for (uint32_t i = threadIdx.x; i < n; i += kThreads) {
    const uint64_t place = work.items[i];
    const float y = scale.log2_weight(value_of(place));
    if (place < cut || !(y >= least)) continue;
    const uint32_t id = id_of(place);
    best = max(best, place_of(y - log2_exponential(word_of(random_words(stream, id / 4), id)), id));
  }
  return best;
}

template <class T, int kThreads>
__device__ int greedy_token(Cluster<kThreads>& cluster, const Row<T, kThreads>& row, typename Row<T, kThreads>::Staged own) {
  const float most = cluster.block_all(own.max, MaxNan());
  const bool finite = isfinite(most) || (most == INFINITY && cluster.block_all(row.any_finite() ? 1 : 0, Max()) != 0);
  uint32_t id = 0xffffffffu;
  if (__any_sync(kAll, own.bound >= most)) {
    row.for_each([&](int i, const float (&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) id = x[e] == most && row.inside(i + e) ? min(id, row.id(i + e)) : id;
    });
  }
  id = cluster.block_all(id, Min());
  if (!cluster.deliver({__float_as_uint(most) | (finite ? 1ull << 32 : 0), id})) return -1;
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
  return any && !isnan(top) ? token : -1;
}

template <class T, int kThreads>
__device__ int drawn_token(SampleWork<T, kThreads>& work, Cluster<kThreads>& cluster, typename Row<T, kThreads>::Staged own) {
  const Settings& set = work.set;
  const Top top = exchange_top(cluster, work.row, own.max);
  if (!top.valid) return -1;
  if (threadIdx.x == 0) {
    work.scale = {top.max, set.inverse()};
    work.range = -work.scale.log2_weight(top.low);
  }
  __syncthreads();
  Selector<T, kThreads> selector(work, cluster, own);
  const auto [cut, listed] = selector.select(set.k, set.share);
  const Scale scale = work.scale;
  const float least = set.least();
  uint64_t best;
  if (listed) {  // every CTA has the whole list: CTA 0 finishes alone
    if (cluster.rank() != 0) return -1;
    best = cluster.block_all(race_items(work, listed, scale, least, cut, set.stream), Max());
  } else {
    best = cluster.block_all(race_row(work.row, scale, least, cut, set.stream), Max());
    if (!cluster.deliver({best, 0})) return -1;
    for (uint32_t r = 0; r < cluster.size(); ++r) best = max(best, cluster.slot(kLastSlot, r).a);
  }
  return static_cast<int>(id_of(best));
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
  const auto own = row.stage();
  if (threadIdx.x == 0) {
    work.row = row;
    work.set = set;
    work.out = p.tokens + at;
  }
  pdl_trigger();
  cluster_wait();  // every CTA of the cluster runs: its shared memory may be written
  __syncthreads();
  const int token = work.set.greedy() ? greedy_token(cluster, work.row, own) : drawn_token(work, cluster, own);
  if (cluster.rank() == 0 && threadIdx.x == 0) *work.out = token;
}

}  // namespace pyllm::sampling
