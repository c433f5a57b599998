// One row of logits spread over a cluster: CTA r works on tokens [r * slice, (r + 1) * slice), read once and, as far as they fit, kept in
// shared memory; later passes read the rest again (mostly from L2: passes walk backwards, newest lines first).
// A slice is cut into chunks of 512 tokens; each warp owns consecutive chunks, so that sums per warp are sums in the order of ids.
// Every token belongs to the same thread in every pass. Any address alignment works; 16-byte aligned rows are fast.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/vec.cuh"
#include "sampling/cluster.cuh"

namespace pyllm::sampling {

__device__ __forceinline__ float vec_max(const Vec<float, 4>& x) { return max_nan(max_nan(x[0], x[1]), max_nan(x[2], x[3])); }
template <class Pair, class T>
__device__ __forceinline__ Pair pairs_max(const Vec<T, 8>& x) {
  const Pair* pair = reinterpret_cast<const Pair*>(&x);
  return __hmax2_nan(__hmax2_nan(pair[0], pair[1]), __hmax2_nan(pair[2], pair[3]));
}
__device__ __forceinline__ float vec_max(const Vec<__nv_bfloat16, 8>& x) {
  const float2 m = __bfloat1622float2(pairs_max<__nv_bfloat162>(x));
  return max_nan(m.x, m.y);
}
__device__ __forceinline__ float vec_max(const Vec<__half, 8>& x) {
  const float2 m = __half22float2(pairs_max<__half2>(x));
  return max_nan(m.x, m.y);
}

template <class T, int kThreads>
struct Row {
  static constexpr int kVec = 16 / sizeof(T);
  static constexpr int kStep = 4;                    // tokens per step of a pass
  static constexpr int kLaneTokens = 16;             // of a chunk, per lane: four steps, the unrolled body of a pass
  static constexpr int kBatch = kLaneTokens / kVec;  // 16-byte vectors of a chunk per lane
  static constexpr int kChunk = 32 * kLaneTokens;    // tokens
  static constexpr int kAhead = 4 / kBatch;          // chunks per step of the first pass: 64 bytes in flight per thread
  static constexpr int kWarps = kThreads / 32;
  using V = Vec<T, kVec>;

  T* held;          // shared memory, held_span chunks per warp
  const T* source;  // this CTA's tokens in global memory
  int first;        // id of the slice's first token
  int count;        // tokens of the slice, may be 0
  int span;         // chunks per warp
  int held_span;    // the first of them in shared memory
  bool aligned;

  __device__ void open(const T* row, int vocab, int slice, int held_tokens, uint32_t rank, T* smem) {
    held = smem;
    first = static_cast<int>(min(static_cast<int64_t>(rank) * slice, static_cast<int64_t>(vocab)));
    count = min(slice, vocab - first);
    source = row + first;
    span = (count + kChunk * kWarps - 1) / (kChunk * kWarps);
    held_span = min(span, held_tokens / (kChunk * kWarps));
    aligned = reinterpret_cast<uintptr_t>(source) % 16 == 0;
  }

  // Position in the slice of vector u of a lane in chunk c of warp w.
  __device__ __forceinline__ int position(int w, int c, int u) const {
    return (w * span + c) * kChunk + (u * 32 + static_cast<int>(threadIdx.x % 32)) * kVec;
  }
  __device__ __forceinline__ T* held_at(int w, int c, int u) const {
    return held + (w * held_span + c) * kChunk + (u * 32 + static_cast<int>(threadIdx.x % 32)) * kVec;
  }

  // Chunks of warp w that hold tokens.
  __device__ __forceinline__ int chunks_of(int w) const { return min(span, max(0, (count + kChunk - 1) / kChunk - w * span)); }

  // Sixteen bytes of tokens from global memory; past the end -inf.
  __device__ __forceinline__ V read(int i) const {
    if (aligned && i + kVec <= count) return *reinterpret_cast<const V*>(source + i);
    V out;
#pragma unroll
    for (int e = 0; e < kVec; ++e) out[e] = i + e < count ? source[i + e] : from_float<T>(-INFINITY);
    return out;
  }

  // The first read of the slice: keeps what fits, returns the maximum of this thread's tokens (NaN if it met one).
  __device__ __forceinline__ float stage() const {
    const int w = threadIdx.x / 32;
    const int whole = aligned ? min(span, max(0, count / kChunk - w * span)) : 0;  // chunks of this warp without an edge
    const int mine = chunks_of(w);
    float best = -INFINITY;
    for (int c0 = 0; c0 < whole; c0 += kAhead) {
      V raw[kAhead * kBatch];
#pragma unroll
      for (int a = 0; a < kAhead * kBatch; ++a) {
        const int c = c0 + a / kBatch;
        const uint4* p = reinterpret_cast<const uint4*>(source + position(w, c, a % kBatch));
        if (c < whole) reinterpret_cast<uint4&>(raw[a]) = c < held_span ? __ldcs(p) : *p;
      }
#pragma unroll
      for (int a = 0; a < kAhead * kBatch; ++a) {
        const int c = c0 + a / kBatch;
        if (c < whole) best = max_nan(best, vec_max(raw[a]));
        if (c < whole && c < held_span) *reinterpret_cast<V*>(held_at(w, c, a % kBatch)) = raw[a];
      }
    }
#pragma unroll 1
    for (int v = whole * kBatch; v < mine * kBatch; ++v) {
      const int c = v / kBatch, u = v % kBatch;
      const V raw = read(position(w, c, u));
      best = max_nan(best, vec_max(raw));
      if (c < held_span) *reinterpret_cast<V*>(held_at(w, c, u)) = raw;
    }
    return best;
  }

  // Runs f(i, x) on every four of this lane's sixteen tokens in chunk c of warp w; i rises, x is fp32, -inf past the end.
  template <class F>
  __device__ __forceinline__ void visit(int w, int c, F&& f, bool active = true) const {
    V raw[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (c < held_span) {
        raw[u] = *reinterpret_cast<const V*>(held_at(w, c, u));
      } else if (active) {
        raw[u] = read(position(w, c, u));
      } else {
#pragma unroll
        for (int e = 0; e < kVec; ++e) raw[u][e] = from_float<T>(-INFINITY);
      }
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
#pragma unroll
      for (int h = 0; h < kVec; h += kStep) {
        float x[kStep];
#pragma unroll
        for (int e = 0; e < kStep; ++e) x[e] = to_float(raw[u][h + e]);
        f(position(w, c, u) + h, x);
      }
    }
  }

  // All of this thread's tokens, all lanes of a warp together. Lanes that are not active may see -inf instead of their tokens.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f, bool active = true) const {
    const int w = threadIdx.x / 32;
#pragma unroll 1
    for (int c = chunks_of(w) - 1; c >= 0; --c) visit(w, c, f, active);
  }

  __device__ __forceinline__ static float max_of(const float (&x)[kStep]) { return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])); }
  __device__ __forceinline__ uint32_t id(int i) const { return static_cast<uint32_t>(first + i); }
  __device__ __forceinline__ bool inside(int i) const { return i < count; }

  __device__ __forceinline__ bool any_finite() const {
    bool finite = false;
    for_each([&](int, const float (&x)[kStep]) {
#pragma unroll
      for (int e = 0; e < kStep; ++e) finite |= isfinite(x[e]);
    });
    return finite;
  }
};

// The row's maximum over the cluster, and a logit that at least k tokens reach (if k > 0; else the smallest maximum of a thread).
struct Top {
  float max, low;
  bool valid;  // no NaN, and a finite logit
};

// A key that at least `wanted` (<= kThreads) threads' keys reach, and not many more.
template <int kThreads>
__device__ __forceinline__ uint32_t reached_key(Cluster<kThreads>& cluster, uint32_t key, int wanted) {
  uint32_t low = cluster.block_all(key, Min()), high = cluster.block_all(key, Max()) + 1;
  while (high - low > 1) {  // at least `wanted` reach low, fewer reach high
    const uint32_t middle = low + (high - low) / 2;
    const int count = __syncthreads_count(key >= middle);
    (count >= wanted ? low : high) = middle;
    if (count >= wanted && count <= wanted + wanted / 8 + 1) break;
  }
  return low;
}

template <class T, int kThreads>
__device__ Top exchange_top(Cluster<kThreads>& cluster, const Row<T, kThreads>& row, float own, uint32_t k) {
  const float mine = cluster.block_all(own, MaxNan());
  const bool finite = isfinite(mine) || (mine == INFINITY && cluster.block_all(row.any_finite() ? 1 : 0, Max()) != 0);
  // Each CTA answers for an equal part of the k tokens: the smallest of the cluster's answers is reached by k threads' maxima.
  const uint32_t part = (k + cluster.size() - 1) / cluster.size();
  const bool brief = part > 0 && part <= kThreads && !isnan(mine);
  const float low = brief ? from_order_key(reached_key(cluster, order_key(own), static_cast<int>(part)))
                          : cluster.block_all(isfinite(own) ? own : INFINITY, Min());
  cluster.publish(kTopSlot, {__float_as_uint(mine) | (finite ? 1ull << 32 : 0), __float_as_uint(low)});
  Top top{-INFINITY, INFINITY, false};
  for (uint32_t r = 0; r < cluster.size(); ++r) {
    const Slot slot = cluster.slot(kTopSlot, r);
    top.max = max_nan(top.max, __uint_as_float(static_cast<uint32_t>(slot.a)));
    top.low = fminf(top.low, __uint_as_float(static_cast<uint32_t>(slot.b)));
    top.valid |= slot.a >> 32;
  }
  top.valid = top.valid && !isnan(top.max);
  return top;
}

}  // namespace pyllm::sampling
