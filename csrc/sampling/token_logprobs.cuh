// token_logprobs: logsumexp of the row, log-probability and rank of one token, and the top_n tokens with their log-probabilities.
//
// One cluster per row, one read of global memory (row.cuh); maximum (1 exchange), one pass that sums exponentials and counts the tokens
// ahead and one that lists the first top_n and few others (select.cuh, 1 exchange for both), ordered by CTA 0.
// Sums are fp32 within four tokens and 2^-40 fixed point beyond: independent of the cluster size.
// Estimates, V = 128256, 256 rows: read 14 us (bf16) or 29 us (fp32) at 4.6 TB/s, the pass over the weights 12 us, and what of the row
// does not fit shared memory again from L2 or HBM.
// Measured, H200, V = 128256, bf16 and fp32, us: 1 row 3.6, 4.0 and with top_n = 20 5.6, 5.8; 256 rows 37, 50 and 42, 57.
#pragma once
#include "common/launch.h"
#include "sampling/select.cuh"
#include "sampling/token_logprobs.h"

namespace pyllm::sampling {

template <class T, int kThreads>
struct LogprobsWork : Work<T, kThreads> {
  float token_logit;
  int token;      // -1: outside [0, V)
  float log_sum;  // logsumexp - maximum
  Slot warp_sum[kMaxWarps];
};

// This CTA's sum of the weights and number of tokens ahead of the given one, into work.
template <class T, int kThreads>
__device__ void sum_and_rank(LogprobsWork<T, kThreads>& work) {
  const Row<T, kThreads> row = work.row;
  const Scale scale = work.scale;
  const float logit = work.token_logit;
  const uint32_t token = static_cast<uint32_t>(work.token);
  uint64_t total = 0;
  uint32_t ahead = 0;
  // Not past the slice's end, where -inf stands for tokens that are not this CTA's.
  const Limits limits = Limits::make(logit, min(static_cast<int>(token), row.first + row.count) - 1);
  const auto count = [&](int i, const float (&x)[4]) {
    float limit[4];
    limits.of(static_cast<int>(row.id(i)), limit);
#pragma unroll
    for (int e = 0; e < 4; ++e) ahead += x[e] >= limit[e] ? 1 : 0;
  };
  if (isfinite(scale.top)) {
    FixedSum fixed;
    row.for_each([&](int i, const float (&x)[4]) {
      float sum = 0.f;
#pragma unroll
      for (int e = 0; e < 4; ++e) sum += exp2_fast(scale.finite_log2_weight(x[e]));
      fixed.add(sum);
      count(i, x);
    });
    total = fixed.total(4 * row.chunks_of(threadIdx.x / 32));
  } else {
    row.for_each_four([&](int i, const float (&x)[4]) {
      float sum = 0.f;
#pragma unroll
      for (int e = 0; e < 4; ++e) sum += scale.weight(x[e]);
      total += __float2ull_rn(sum * kTotalUnit);
      count(i, x);
    });
  }
  total = warp_sum(total);
  ahead = __reduce_add_sync(kAll, ahead);
  if (threadIdx.x % 32 == 0) work.warp_sum[threadIdx.x / 32] = {total, ahead};
}

template <class T, int kThreads>
__device__ void write_row(const TokenLogprobsParams& p, int64_t at, const LogprobsWork<T, kThreads>& work, uint32_t count, uint64_t ahead) {
  const float top = work.scale.top, log_sum = work.log_sum;
  if (threadIdx.x == 0) {
    const bool inside = work.token >= 0;
    p.logprob[at] = inside ? fminf(work.token_logit - top, 0.f) - log_sum : NAN;
    p.rank[at] = inside ? static_cast<int32_t>(ahead) + 1 : 0;
  }
  for (int i = static_cast<int>(p.vocab) + threadIdx.x; i < p.top_n; i += kThreads) {
    p.top_logprobs[at * p.top_n + i] = -INFINITY;
    p.top_tokens[at * p.top_n + i] = -1;
  }
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t i = threadIdx.x / 32; i < count; i += kThreads / 32) {
    const uint64_t mine = work.items[i];
    uint32_t place = 0;
    for (uint32_t j = lane; j < count; j += 32) place += work.items[j] > mine;
    place = __reduce_add_sync(kAll, place);
    if (lane != 0 || place >= p.top_n) continue;
    p.top_logprobs[at * p.top_n + place] = fminf(value_of(mine) - top, 0.f) - log_sum;
    p.top_tokens[at * p.top_n + place] = static_cast<int32_t>(id_of(mine));
  }
}

template <int kThreads>
__device__ void write_invalid(const TokenLogprobsParams& p, int64_t at) {
  if (threadIdx.x == 0) {
    p.logprob[at] = NAN;
    p.rank[at] = 0;
  }
  for (int i = threadIdx.x; i < p.top_n; i += kThreads) {
    p.top_logprobs[at * p.top_n + i] = NAN;
    p.top_tokens[at * p.top_n + i] = -1;
  }
}

// grid: rows * cluster; dynamic shared memory: LogprobsWork, `held` tokens, their bounds (Row::tops).
template <class T, int kThreads>
__global__ __launch_bounds__(kThreads, 1024 / kThreads) void token_logprobs_kernel(TokenLogprobsParams p, int slice, int held) {
  extern __shared__ __align__(16) unsigned char smem[];
  auto& work = *reinterpret_cast<LogprobsWork<T, kThreads>*>(smem);
  Cluster<kThreads> cluster(work.exchange);
  const int64_t at = blockIdx.x / cluster.size();
  const int vocab = static_cast<int>(p.vocab);
  const T* logits = static_cast<const T*>(p.logits) + at * p.row_stride;
  Row<T, kThreads> row;
  row.open(logits, vocab, slice, held, cluster.rank(), reinterpret_cast<T*>(smem + sizeof(work)));
  pdl_wait();
  int token = -1;
  if (threadIdx.x == 0) token = p.tokens[at];
  const float own = row.stage();
  if (threadIdx.x == 0) {
    work.row = row;
    work.found_count = 0;
    work.token = token >= 0 && token < vocab ? token : -1;
    work.token_logit = work.token >= 0 ? to_float(logits[work.token]) : 0.f;
  }
  pdl_trigger();
  cluster.open();

  const int n = static_cast<int>(min(p.top_n, p.vocab));
  const Top top = exchange_top(cluster, work.row, own, n < vocab ? n : 0, work.keys, reinterpret_cast<uint32_t*>(work.exchange.parts[0]));
  if (!top.valid) {
    if (cluster.rank() == 0) write_invalid<kThreads>(p, at);
    return;
  }
  const bool brief = n > 0 && n < vocab;
  if (threadIdx.x == 0) {
    work.scale = {top.max, kLog2e};
    work.low = top.low;
  }
  __syncthreads();
  sum_and_rank(work);
  Selector<T, kThreads> selector(work, cluster);
  if (brief) selector.find_reaching();
  cluster.publish(kGatherSlot, [&] {
    Slot mine{0, static_cast<uint64_t>(work.found_count) << 32};
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      mine.a += work.warp_sum[w].a;
      mine.b += work.warp_sum[w].b;
    }
    return mine;
  });
  const uint32_t lane = threadIdx.x % 32;
  const Slot theirs = cluster.lane_slot(kGatherSlot);
  const uint64_t total = __shfl_sync(kAll, warp_scan(theirs.a), 31);
  const uint32_t ahead = __reduce_add_sync(kAll, static_cast<uint32_t>(theirs.b));
  const uint32_t found = static_cast<uint32_t>(theirs.b >> 32);
  if (threadIdx.x == 0) work.log_sum = logf(static_cast<float>(total) * (1.f / kTotalUnit));
  uint32_t count = 0;
  if (brief) count = selector.collect(__reduce_add_sync(kAll, lane < cluster.rank() ? found : 0u), __reduce_add_sync(kAll, found));
  if (n > 0 && count == 0) {
    count = selector.gather_from(brief ? selector.place_of_kth(n) : 0);
    cluster_sync();  // peers read this CTA's tokens: it must not exit before
  }
  if (cluster.rank() != 0) return;
  __syncthreads();
  write_row(p, at, work, count, ahead);
}

}  // namespace pyllm::sampling
