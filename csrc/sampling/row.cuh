// One row of logits spread over a cluster: CTA r works on tokens [r * slice, (r + 1) * slice), read once and, as far as they fit, kept in
// shared memory; later passes read the rest again (mostly from L2: passes walk backwards, newest lines first).
// A slice is cut into chunks of 512 tokens; each warp owns consecutive chunks, so that sums per warp are sums in the order of ids. Of each
// lane's sixteen tokens of a chunk a bound is kept, so that passes which look for few tokens read few.
// Any address alignment works; 16-byte aligned rows are fast.
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

// Pointers that were kept in shared memory are generic to the compiler; so these name the space.
__device__ __forceinline__ uint4 load_global(const void* p) {
  uint4 x;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(__cvta_generic_to_global(p)));
  return x;
}
template <class V>
__device__ __forceinline__ V& in_shared(uint32_t address, int i) {  // element i of an array at `address`
  return *static_cast<V*>(__cvta_shared_to_generic(address + static_cast<uint32_t>(i) * sizeof(V)));
}

// Four tokens in fp32: number h of those in 16 bytes.
__device__ __forceinline__ void unpack_four(const Vec<float, 4>&, const uint4& raw, int, float (&x)[4]) {
  x[0] = __uint_as_float(raw.x), x[1] = __uint_as_float(raw.y), x[2] = __uint_as_float(raw.z), x[3] = __uint_as_float(raw.w);
}
__device__ __forceinline__ void unpack_four(const Vec<__nv_bfloat16, 8>&, const uint4& raw, int h, float (&x)[4]) {
  const uint32_t a = h ? raw.z : raw.x, b = h ? raw.w : raw.y;
  x[0] = __uint_as_float(a << 16), x[1] = __uint_as_float(a & 0xffff0000u);
  x[2] = __uint_as_float(b << 16), x[3] = __uint_as_float(b & 0xffff0000u);
}
__device__ __forceinline__ void unpack_four(const Vec<__half, 8>&, const uint4& raw, int h, float (&x)[4]) {
  const uint32_t pair[2] = {h ? raw.z : raw.x, h ? raw.w : raw.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 y = __half22float2(reinterpret_cast<const __half2&>(pair[i]));
    x[2 * i] = y.x, x[2 * i + 1] = y.y;
  }
}

constexpr int kMaxTops = 32;  // chunks per warp up to which the largest token of each lane's sixteen is kept

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

  uint32_t held;    // address in shared memory, held_span chunks per warp
  uint32_t tops;    // address in shared memory: bounds of each lane's tokens of a chunk; 0: none are kept
  const T* source;  // this CTA's tokens in global memory
  int first;        // id of the slice's first token
  int count;        // tokens of the slice, may be 0
  int span;         // chunks per warp
  int held_span;    // the first of them in shared memory
  bool aligned;

  __device__ void open(const T* row, int vocab, int slice, int held_tokens, uint32_t rank, T* smem) {
    held = shared_address(smem);
    tops = slice <= kMaxTops * kChunk * kWarps ? shared_address(smem + held_tokens) : 0;
    first = static_cast<int>(min(static_cast<int64_t>(rank) * slice, static_cast<int64_t>(vocab)));
    count = min(slice, vocab - first);
    source = row + first;
    span = (count + kChunk * kWarps - 1) / (kChunk * kWarps);
    held_span = min(span, held_tokens / (kChunk * kWarps));
    aligned = reinterpret_cast<uintptr_t>(source) % 16 == 0;
  }

  // Position in the slice of vector u of a lane in chunk c of warp w.
  __device__ __forceinline__ int position(int w, int c, int u, int lane = threadIdx.x % 32) const {
    return (w * span + c) * kChunk + (u * 32 + lane) * kVec;
  }
  __device__ __forceinline__ uint4& held_at(int w, int c, int u, int lane = threadIdx.x % 32) const {
    return in_shared<uint4>(held, ((w * held_span + c) * kBatch + u) * 32 + lane);
  }
  // A bound of this thread's tokens in chunk c.
  __device__ __forceinline__ __nv_bfloat16& top(int c) const { return in_shared<__nv_bfloat16>(tops, c * kThreads + threadIdx.x); }

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
      uint4 raw[kAhead * kBatch];
      float most = -INFINITY;
#pragma unroll
      for (int a = 0; a < kAhead * kBatch; ++a) {
        const int c = c0 + a / kBatch;
        if (c < whole) raw[a] = load_global(source + position(w, c, a % kBatch));
      }
#pragma unroll
      for (int a = 0; a < kAhead * kBatch; ++a) {
        const int c = c0 + a / kBatch;
        if (c < whole) most = max_nan(most, vec_max(reinterpret_cast<const V&>(raw[a])));
        if (a % kBatch == kBatch - 1) {
          if (c < whole && tops != 0) top(c) = __float2bfloat16_ru(most);
          best = max_nan(best, most);
          most = -INFINITY;
        }
        if (c < whole && c < held_span) held_at(w, c, a % kBatch) = raw[a];
      }
    }
#pragma unroll 1
    for (int v = whole * kBatch; v < mine * kBatch; ++v) {
      const int c = v / kBatch, u = v % kBatch;
      const V raw = read(position(w, c, u));
      best = max_nan(best, vec_max(raw));
      if (c < held_span) held_at(w, c, u) = reinterpret_cast<const uint4&>(raw);
      if (tops != 0) top(c) = __float2bfloat16_ru(INFINITY);
    }
    return best;
  }

  // Tokens `at` ... `at` + 3 of chunk c of warp w.
  __device__ __forceinline__ void four(int w, int c, int at, float (&x)[kStep]) const {
    Vec<T, kStep> raw;
    const int i = (w * span + c) * kChunk + at;
    if (c < held_span) {
      raw = in_shared<Vec<T, kStep>>(held, ((w * held_span + c) * kChunk + at) / kStep);
    } else if (aligned && i + kStep <= count) {
      raw = load_vec<T, kStep>(source + i);
    } else {
#pragma unroll
      for (int e = 0; e < kStep; ++e) raw[e] = i + e < count ? source[i + e] : from_float<T>(-INFINITY);
    }
#pragma unroll
    for (int e = 0; e < kStep; ++e) x[e] = to_float(raw[e]);
  }

  // Runs f(i, x) on all tokens of this warp, four at a time, in little code instead of little time: for rare passes.
  template <class F>
  __device__ __forceinline__ void for_each_four(F&& f) const {
    constexpr int kSteps = kLaneTokens / kStep;
    const int w = threadIdx.x / 32, lane = threadIdx.x % 32, steps = chunks_of(w) * kSteps;
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
      const int c = n / kSteps, at = (n % kSteps * 32 + lane) * kStep;
      float x[kStep];
      four(w, c, at, x);
      f((w * span + c) * kChunk + at, x);
    }
  }

  // A lane's sixteen tokens of a chunk.
  struct Chunk {
    uint4 v[kBatch];
  };

  // Chunk c of warp w; -inf past the end. All loads are issued together.
  __device__ __forceinline__ Chunk load(int w, int c, int lane = threadIdx.x % 32) const {
    Chunk x;
    if (c < held_span) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) x.v[u] = held_at(w, c, u, lane);
    } else if (aligned && (w * span + c + 1) * kChunk <= count) {
      const T* const p = source + position(w, c, 0, lane);
#pragma unroll
      for (int u = 0; u < kBatch; ++u) x.v[u] = load_global(p + u * 32 * kVec);
    } else {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const V raw = read(position(w, c, u, lane));
        x.v[u] = reinterpret_cast<const uint4&>(raw);
      }
    }
    return x;
  }

  // Runs f(i, x) on every four of a lane's sixteen tokens in chunk c of warp w; i rises, x is fp32.
  template <class F>
  __device__ __forceinline__ void visit(int w, int c, const Chunk& raw, F&& f, int lane = threadIdx.x % 32) const {
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
#pragma unroll
      for (int h = 0; h < kVec; h += kStep) {
        float x[kStep];
        unpack_four(V(), raw.v[u], h / kStep, x);
        f(position(w, c, u, lane) + h, x);
      }
    }
  }

  // All of this thread's tokens, all lanes of a warp together, the loads of a chunk ahead of it.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    const int w = threadIdx.x / 32, last = chunks_of(w) - 1;
#pragma unroll 1
    for (int c = last; c >= 0; --c) visit(w, c, load(w, c), f);
  }

  // The same where only tokens from `least` on count: sixteens that have none are not read. The lanes of a warp share what is left, which
  // waits in `queue` (64 per warp) until there is one for each lane. Returns for how many fours this thread called f.
  template <class F>
  __device__ __forceinline__ int for_each_from(float least, uint16_t (&queues)[kWarps][64], F&& f) const {
    const int w = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = chunks_of(w);
    uint16_t* const queue = queues[w];
    int pending = 0, c = 0, fours = 0;
#pragma unroll 1
    while (c < chunks || pending > 0) {
#pragma unroll 1
      for (; c < chunks && pending < 32; ++c) {
        const bool take = tops == 0 || __bfloat162float(top(c)) >= least;
        const uint32_t takers = __ballot_sync(kAll, take);
        if (take) queue[pending + __popc(takers & ((1u << lane) - 1))] = static_cast<uint16_t>(c * 32 + lane);
        pending += __popc(takers);
      }
      __syncwarp();
      if (lane < pending) {
        const int at = queue[lane] / 32, owner = queue[lane] % 32;
        visit(w, at, load(w, at, owner), f, owner);
        fours += kLaneTokens / kStep;
      }
      pending = max(pending - 32, 0);
      if (lane < pending) queue[lane] = queue[lane + 32];
      __syncwarp();
    }
    return fours;
  }

  __device__ __forceinline__ static float max_of(const float (&x)[kStep]) { return fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])); }
  __device__ __forceinline__ uint32_t id(int i) const { return static_cast<uint32_t>(first + i); }
  __device__ __forceinline__ bool inside(int i) const { return i < count; }

  __device__ __forceinline__ bool any_finite() const {
    bool finite = false;
    for_each_four([&](int, const float (&x)[kStep]) {
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

// A key that at least `wanted` threads' keys reach, and not many more; at least `wanted` reach low, fewer reach high.
template <int kThreads>
__device__ __forceinline__ uint32_t reached_key(uint32_t key, int wanted, uint32_t low, uint32_t high) {
#pragma unroll 1
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const int count = __syncthreads_count(key >= middle);
    (count >= wanted ? low : high) = middle;
    if (count >= wanted && count <= wanted + wanted / 8 + 1) break;
  }
  return low;
}

// CTAs of a row from which on a bound for k tokens comes from the keys of all CTAs' half warps: much tighter than the smallest of the
// CTAs' answers, so that fewer tokens are listed.
constexpr uint32_t kKeyCtas = 8;

// Every CTA gets the largest keys of all half warps, kThreads / 16 per CTA, one per thread; 0 in the threads beyond.
template <int kThreads>
__device__ __forceinline__ uint32_t exchange_keys(Cluster<kThreads>& cluster, uint32_t* keys, uint32_t* own_keys, uint32_t key) {
  constexpr uint32_t kKeysOf = kThreads / 16, kSends = kKeysOf / 4;
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(kAll, key, offset));
  if (threadIdx.x % 16 == 0) own_keys[threadIdx.x / 16] = key;
  __syncthreads();
  if (threadIdx.x < cluster.size() * kSends) {
    const uint32_t at = threadIdx.x % kSends * 4;
    send(keys + cluster.rank() * kKeysOf + at, cluster.ready(kKeys), threadIdx.x / kSends, *reinterpret_cast<const uint4*>(own_keys + at));
  }
  if (threadIdx.x == 0) cluster.expect(kKeys, cluster.size() * kKeysOf * sizeof(uint32_t));
  cluster.wait(kKeys);
  return threadIdx.x < cluster.size() * kKeysOf ? keys[threadIdx.x] : 0;
}

// keys: kThreads of shared memory, not used before.
template <class T, int kThreads>
__device__ Top exchange_top(Cluster<kThreads>& cluster, const Row<T, kThreads>& row, float own, uint32_t k, uint32_t* keys,
                            uint32_t* own_keys) {
  const uint32_t size = cluster.size();
  uint32_t key = order_key(own);
  Span span;
  if (size >= kKeyCtas && k > 0 && k <= size * (kThreads / 32)) {
    key = exchange_keys(cluster, keys, own_keys, key);
    span = cluster.block_span(key ? key : 0xffffffffu, key);
    if (span.max != 0xffffffffu) span.min = reached_key<kThreads>(key, static_cast<int>(k), span.min, span.max + 1);
  } else {
    const uint32_t part = (k + size - 1) / size;
    const bool brief = part > 0 && part <= kThreads;
    // Each CTA answers for an equal part of the k tokens: the smallest of the cluster's answers is reached by k threads' maxima.
    span = cluster.block_span(brief || isfinite(own) ? key : 0xffffffffu, key);
    if (brief && span.max != 0xffffffffu) span.min = reached_key<kThreads>(key, static_cast<int>(part), span.min, span.max + 1);
    cluster.publish(kTopSlot, [&] { return Slot{static_cast<uint64_t>(span.max) << 32 | span.min, 0}; });
    const uint64_t theirs = cluster.slot(kTopSlot, min(threadIdx.x % 32, size - 1)).a;
    span = {__reduce_min_sync(kAll, static_cast<uint32_t>(theirs)), __reduce_max_sync(kAll, static_cast<uint32_t>(theirs >> 32))};
  }
  const float most = from_order_key(span.max);
  bool valid = isfinite(most);
  if (most == INFINITY) {
    const int finite = __syncthreads_or(row.any_finite());
    cluster.publish(kCountSlot, [&] { return Slot{static_cast<uint64_t>(finite), 0}; });
    valid = __any_sync(kAll, cluster.lane_slot(kCountSlot).a != 0);
  }
  return {most, from_order_key(span.min), valid};
}

}  // namespace pyllm::sampling
