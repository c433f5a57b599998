// One row of logits spread over a cluster: CTA r stages tokens [r * slice, (r + 1) * slice) in shared memory with one read of global
// memory; every later pass reads shared memory. A row too long for 16 CTAs (fp32 past ~800k tokens) leaves the rest in global memory and
// reads it again in each pass. Any address alignment: rows that are not 16-byte aligned are staged element by element (coalesced).
// Vector v of a slice (16 bytes of tokens) belongs to thread v % kThreads in every pass.
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
  static constexpr int kStep = 4;   // tokens per step of a pass
  static constexpr int kLoads = 4;  // 16-byte loads in flight per thread: 64 KB per SM at 1024 threads, twice what saturates HBM
  using V = Vec<T, kVec>;

  T* held;          // shared memory, held_vecs vectors
  const T* source;  // this CTA's tokens in global memory
  int first;        // id of the slice's first token, a multiple of kVec
  int count;        // tokens of the slice, may be 0
  int held_vecs;

  __device__ void open(const T* row, int vocab, int slice, int held_tokens, uint32_t rank, T* smem) {
    held = smem;
    first = static_cast<int>(min(static_cast<int64_t>(rank) * slice, static_cast<int64_t>(vocab)));
    count = min(slice, vocab - first);
    source = row + first;
    held_vecs = min(vecs(), held_tokens / kVec);
  }

  __device__ __forceinline__ int vecs() const { return (count + kVec - 1) / kVec; }

  // Reads the slice. max: of what this thread read (NaN if it met one). bound: no token of this thread in later passes is larger.
  struct Staged {
    float max, bound;
  };
  __device__ __forceinline__ Staged stage() const {
    const bool aligned = reinterpret_cast<uintptr_t>(source) % 16 == 0;
    const int tid = threadIdx.x;
    float best = -INFINITY;
    int done = 0;
    if (aligned) {
      done = min(held_vecs, count / kVec);
      for (int v0 = tid; v0 < done; v0 += kThreads * kLoads) {
        uint4 raw[kLoads];
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          if (v0 + u * kThreads < done) raw[u] = __ldcs(reinterpret_cast<const uint4*>(source) + v0 + u * kThreads);
        }
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          if (v0 + u * kThreads < done) {
            reinterpret_cast<uint4*>(held)[v0 + u * kThreads] = raw[u];
            best = max_nan(best, vec_max(reinterpret_cast<const V&>(raw[u])));
          }
        }
      }
    }
    best = max_nan(best, aligned ? stage_tail(done) : stage_elements());
    if (held_vecs < vecs()) {
      for_each([&](int i, const float (&x)[kStep]) {
#pragma unroll
        for (int e = 0; e < kStep; ++e) best = i >= held_vecs * kVec ? max_nan(best, x[e]) : best;
      });
    }
    return {best, aligned ? best : INFINITY};
  }

  // Tokens i ... i + 3 of the slice as fp32 (i a multiple of 4); past its end -inf.
  __device__ __forceinline__ void load(int i, float (&x)[kStep]) const {
    if (i < held_vecs * kVec) {
      const auto raw = load_vec<T, kStep>(held + i);
#pragma unroll
      for (int e = 0; e < kStep; ++e) x[e] = to_float(raw[e]);
      return;
    }
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      x[e] = inside(i + e) ? to_float(source[i + e]) : -INFINITY;
    }
  }

  // Runs f(i, x) on every four tokens, all lanes of a warp together (x = -inf past the end). Four for every dtype: half the code and
  // registers of eight.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    const int n = vecs();
    for (int v0 = 0; v0 + static_cast<int>(threadIdx.x & ~31u) < n; v0 += kThreads) {
#pragma unroll 1
      for (int h = 0; h < kVec; h += kStep) {
        const int i = (v0 + static_cast<int>(threadIdx.x)) * kVec + h;
        float x[kStep];
        load(i, x);
        f(i, x);
      }
    }
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

 private:
  // The last, partial vector of an aligned slice, by the thread that owns it.
  __device__ __forceinline__ float stage_tail(int v) const {
    float best = -INFINITY;
    if (v < held_vecs && static_cast<int>(threadIdx.x) == v % kThreads) {
      for (int i = v * kVec; i < (v + 1) * kVec; ++i) best = max_nan(best, stage_element(i));
    }
    return best;
  }
  __device__ __forceinline__ float stage_elements() const {
    constexpr int kBatch = 8;
    const int n = held_vecs * kVec;
    float best = -INFINITY;
    for (int i0 = threadIdx.x; i0 < n; i0 += kThreads * kBatch) {
      T raw[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int i = i0 + u * kThreads;
        raw[u] = i < n && i < count ? source[i] : from_float<T>(-INFINITY);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int i = i0 + u * kThreads;
        if (i < n) held[i] = raw[u];
        best = max_nan(best, to_float(raw[u]));
      }
    }
    return best;
  }
  __device__ __forceinline__ float stage_element(int i) const {
    const T x = i < count ? source[i] : from_float<T>(-INFINITY);
    held[i] = x;
    return to_float(x);
  }
};

// The row's maximum over the cluster, and the smallest of the threads' maxima.
struct Top {
  float max, low;
  bool valid;  // no NaN, and a finite logit
};

template <class T, int kThreads>
__device__ Top exchange_top(Cluster<kThreads>& cluster, const Row<T, kThreads>& row, float own) {
  const float mine = cluster.block_all(own, MaxNan());
  const float low = cluster.block_all(isfinite(own) ? own : INFINITY, Min());
  const bool finite = isfinite(mine) || (mine == INFINITY && cluster.block_all(row.any_finite() ? 1 : 0, Max()) != 0);
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
