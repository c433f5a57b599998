// qk_norm_rope_append, for each token t and head x of D values:
//   y = x * rsqrt(mean(x^2) + eps) * weight (Q, K; optional), then (a, b) -> (a c - b s, b c + a s) on the pairs of the first R values,
//   Q to q[t, h], K and V to slot slots[t] of the paged caches (e4m3 or s8 of v / scale, or rounded). fp32 inside, one rounding.
//
// Layout: Lanes neighbouring lanes own a head, each two chunks of 8 values: one of either half of the rotation, so that a pair lives in
// one thread and its cosines serve both. A CTA owns one token and Threads / Lanes heads per pass; a thread keeps the loads of all its
// passes in flight and reads the cosines of its token once. Sums of squares: 16 values in the thread, then a butterfly over the lanes.
// Measured: rope_halves.cuh, which takes the common case: H200, T = 8192, 32 + 2 * 8 heads of 128, bf16: 95.7 % of a copy of the same
// bytes, fp8 cache 95.2 %, with the norm 94.0 %.
// Limits: D a multiple of 8, at most 256. Rotations whose halves are not whole chunks (R % 16 != 0; interleaved: R % 8 != 0) take
// Chunked = false: it reads the partner of each value again, by scalar loads.
#pragma once
#include <type_traits>

#include "common/fp8.cuh"
#include "common/reduce.cuh"
#include "fused/elementwise.cuh"
#include "fused/qk_norm_rope_append.h"

namespace pyllm::fused {

constexpr int kChunk = 8;
constexpr int kMaxDim = 256;
constexpr int kRopeThreads = 128;
constexpr int kRopeHeads = 3;    // that a thread holds at most, of bf16 and fp16 (fp32: 2)
constexpr int kRopeMinCtas = 6;  // caps a thread at 80 registers
// Up to this many CTAs per SM each thread takes one head: more CTAs, less latency. Beyond it, as many heads as it can hold.
constexpr int kRopeSpreadCtas = 4;

// What the launch adds to the parameters.
struct RopePlan {
  int passes;         // over the groups of a CTA: heads of a thread, at most Heads
  int turning;        // chunk pairs (i, i + R / 2) of a head, 0 when interleaved
  int rest;           // lanes that own the dimensions behind them
  float inverse_dim;  // 1 / D
  RowSplit page;      // splits a slot into page and offset
};

// 8 values as they lie in memory: 16 bytes, fp32 32.
template <class T>
struct RawChunk {
  uint4 v[sizeof(T) / 2];
};

template <class T>
__device__ __forceinline__ RawChunk<T> load_chunk(const T* p) {
  RawChunk<T> raw;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) raw.v[i] = load_vector(p + i * kWidth<T>);
  return raw;
}

template <class T>
__device__ __forceinline__ void unpack_chunk(const RawChunk<T>& raw, float* y) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    float part[kWidth<T>];
    unpack<T>(raw.v[i], part);
#pragma unroll
    for (int j = 0; j < kWidth<T>; ++j) y[i * kWidth<T> + j] = part[j];
  }
}

template <class T>
__device__ __forceinline__ void store_chunk(T* p, const float* y) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) {
    float part[kWidth<T>];
#pragma unroll
    for (int j = 0; j < kWidth<T>; ++j) part[j] = y[i * kWidth<T> + j];
    store_vector(p + i * kWidth<T>, pack<T>(part));
  }
}

__device__ __forceinline__ uint32_t to_e4m3x4(const float* v, float inverse) {
  return to_e4m3x2(v[0] * inverse, v[1] * inverse) | static_cast<uint32_t>(to_e4m3x2(v[2] * inverse, v[3] * inverse)) << 16;
}

// To the nearest, ties to even, within +-127; NaN is 0.
__device__ __forceinline__ uint32_t to_s8x4(const float* v, float inverse) {
  uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = static_cast<uint32_t>(max(-127, min(127, __float2int_rn(v[i] * inverse))));
  return __byte_perm(__byte_perm(x[0], x[1], 0x0040), __byte_perm(x[2], x[3], 0x0040), 0x5410);
}

// s8 or e4m3 is decided at run time: a kernel more for each shape would be a third of their code for a branch that all threads take alike.
__device__ __forceinline__ void store_chunk_byte(const QkNormRopeAppendParams& p, uint8_t* to, const float* y, float inverse) {
  uint2 words;
  if (p.cache == KvCache::kS8) {
    words = {to_s8x4(y, inverse), to_s8x4(y + 4, inverse)};
  } else {
    words = {to_e4m3x4(y, inverse), to_e4m3x4(y + 4, inverse)};
  }
  *reinterpret_cast<uint2*>(to) = words;
}

// 4 cosines or sines, through L1: all heads of the token share them.
__device__ __forceinline__ void load_four(const float* p, float* out) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}

// The two chunks of a lane: their first dimensions (0 where there is none, so that it may be read), whether they exist, whether they turn.
struct Chunks {
  int at[2];
  bool exists[2], turns[2];
};

__device__ __forceinline__ Chunks chunks_of(const QkNormRopeAppendParams& p, const RopePlan& plan, int lane) {
  const int behind = lane - plan.turning;
  if (behind < 0) return {{lane * kChunk, (lane + plan.turning) * kChunk}, {true, true}, {true, true}};
  const int first = (behind + 2 * plan.turning) * kChunk, second = first + plan.rest * kChunk;
  const bool one = behind < plan.rest, two = one && second < p.dim;
  return {{one ? first : 0, two ? second : 0},
          {one, two},
          {p.interleaved && one && first < p.rotary, p.interleaved && two && second < p.rotary}};
}

enum HeadKind : int { kQ, kK, kV };

// The head at `index` of a row of qkv: kind, and its index among the heads of its kind.
struct Head {
  int kind, local;
};
__device__ __forceinline__ Head head_at(const QkNormRopeAppendParams& p, int index) {
  const int first_k = p.heads, first_v = p.heads + p.kv_heads;
  const int kind = (index >= first_k) + (index >= first_v);
  return {kind, index - (kind == kQ ? 0 : kind == kK ? first_k : first_v)};
}

// The norm weights in fp32, in shared memory, 1 where a kind has none: constants, so this runs ahead of the wait. Ends without a barrier.
template <class T>
__device__ __forceinline__ void fill_weights(const QkNormRopeAppendParams& p, float (&weights)[2][kMaxDim]) {
#pragma unroll 1
  for (int i = threadIdx.x; i < p.dim; i += kRopeThreads) {
    float q = 1.f, k = 1.f;
    if (p.q_weight != nullptr)
      q = p.q_weight_fp32 ? static_cast<const float*>(p.q_weight)[i] : to_float(static_cast<const T*>(p.q_weight)[i]);
    if (p.k_weight != nullptr)
      k = p.k_weight_fp32 ? static_cast<const float*>(p.k_weight)[i] : to_float(static_cast<const T*>(p.k_weight)[i]);
    weights[kQ][i] = q;
    weights[kK][i] = k;
  }
}

// cosines[i], sines[i] for i < 8: of the pairs (first[i], second[i]), or interleaved of first's 4 pairs and second's 4.
__device__ __forceinline__ void load_rotation(const QkNormRopeAppendParams& p, const Chunks& c, const float* line, float* cosines,
                                              float* sines) {
  const float* const sine_line = line + p.rotary / 2;
  if (p.interleaved) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (!c.turns[k]) continue;
      load_four(line + c.at[k] / 2, cosines + 4 * k);
      load_four(sine_line + c.at[k] / 2, sines + 4 * k);
    }
  } else if (c.turns[0]) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      load_four(line + c.at[0] + 4 * k, cosines + 4 * k);
      load_four(sine_line + c.at[0] + 4 * k, sines + 4 * k);
    }
  }
}

__device__ __forceinline__ void turn(float& a, float& b, float c, float s) {
  const float turned = a * c - b * s;
  b = b * c + a * s;
  a = turned;
}

__device__ __forceinline__ void rotate_chunks(const QkNormRopeAppendParams& p, const Chunks& c, float* y, const float* cosines,
                                              const float* sines) {
  if (p.interleaved) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (c.turns[i / 4]) turn(y[2 * i], y[2 * i + 1], cosines[i], sines[i]);
    }
  } else if (c.turns[0]) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) turn(y[i], y[i + kChunk], cosines[i], sines[i]);
  }
}

// Any R: the partner of a value is read again and normed again. x: the head in qkv; weight: of its kind, null without a norm.
template <class T>
__device__ __forceinline__ void rotate_scalar(const QkNormRopeAppendParams& p, const Chunks& c, const T* x, const float* line, float factor,
                                              const float* weight, float* y) {
  const int half = p.rotary / 2;
#pragma unroll
  for (int i = 0; i < 2 * kChunk; ++i) {
    const int d = c.at[i / kChunk] + i % kChunk;
    if (!c.exists[i / kChunk] || d >= p.rotary) continue;
    const bool first = p.interleaved ? d % 2 == 0 : d < half;
    const int pair = p.interleaved ? d / 2 : (first ? d : d - half);
    const int partner = p.interleaved ? d ^ 1 : (first ? d + half : d - half);
    const float other = to_float(x[partner]) * (weight != nullptr ? factor * weight[partner] : 1.f);
    const float cosine = line[pair], sine = line[half + pair];
    y[i] = first ? y[i] * cosine - other * sine : y[i] * cosine + other * sine;
  }
}

// Where the heads of one token go: the first head of each kind.
template <class T, bool Byte>
struct Lines {
  using Cache = std::conditional_t<Byte, uint8_t, T>;
  T* q;
  Cache* k;
  Cache* v;
  bool stored;  // the token has a slot

  __device__ __forceinline__ Lines(const QkNormRopeAppendParams& p, const RowSplit& page, int64_t token) {
    const int slot = p.slots != nullptr ? p.slots[token] : -1;
    const RowCol at = split_index(page, static_cast<uint32_t>(max(slot, 0)));
    const int64_t inside = static_cast<int64_t>(at.col) * p.kv_heads * p.dim;
    q = static_cast<T*>(p.q) + token * p.heads * p.dim;
    k = static_cast<Cache*>(p.k_cache) + at.row * p.k_page_stride + inside;
    v = static_cast<Cache*>(p.v_cache) + at.row * p.v_page_stride + inside;
    stored = slot >= 0;
  }
};

template <class T, bool Byte>
__device__ __forceinline__ void store_head(const QkNormRopeAppendParams& params, const Lines<T, Byte>& to, const Chunks& c,
                                           const Head& head, float inverse, const float* y) {
  const int dim = params.dim;
  if (head.kind != kQ && !to.stored) return;
  if (Byte && head.kind != kQ) {
    uint8_t* const p = reinterpret_cast<uint8_t*>(head.kind == kK ? to.k : to.v) + head.local * dim;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (c.exists[k]) store_chunk_byte(params, p + c.at[k], y + k * kChunk, inverse);
    }
    return;
  }
  T* p = to.q;
  if constexpr (!Byte) p = head.kind == kQ ? to.q : head.kind == kK ? to.k : to.v;
  p += head.local * dim;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (c.exists[k]) store_chunk(p + c.at[k], y + k * kChunk);
  }
}

// y *= factor * weight over the two chunks.
__device__ __forceinline__ void scale_chunks(const Chunks& c, const float* weight, float factor, float* y) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float w[kChunk];
    load_four(weight + c.at[k], w);
    load_four(weight + c.at[k] + 4, w + 4);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) y[k * kChunk + i] *= factor * w[i];
  }
}

// grid (T, pieces): a piece is `passes` times Threads / Lanes heads of the row.
template <class T, int Lanes, int Heads, bool Chunked, bool Byte>
__global__ void __launch_bounds__(kRopeThreads, sizeof(T) == 4 ? 2 : kRopeMinCtas)
    qk_norm_rope_append_kernel(const __grid_constant__ QkNormRopeAppendParams p, const __grid_constant__ RopePlan plan) {
  constexpr int kGroups = kRopeThreads / Lanes;
  __shared__ __align__(16) float weights[2][kMaxDim];
  const int64_t token = blockIdx.x;
  const int begin_head = blockIdx.y * plan.passes * kGroups;
  const int end_head = min(p.heads + 2 * p.kv_heads, begin_head + plan.passes * kGroups);
  const int first_head = begin_head + threadIdx.x / Lanes;
  const Chunks c = chunks_of(p, plan, threadIdx.x % Lanes);
  const T* const row = static_cast<const T*>(p.qkv) + token * p.qkv_stride;
  const T* from[2] = {row + (first_head * p.dim + c.at[0]), row + (first_head * p.dim + c.at[1])};
  asm volatile("" : "+l"(from[0]), "+l"(from[1]));  // computed here, ahead of the wait, and not once per load behind it
  const bool norm = p.q_weight != nullptr || p.k_weight != nullptr;
  if (norm) fill_weights<T>(p, weights);

  pdl_wait();
  // The line number first: the cosines hang on it, and those two latencies cover that of the heads.
  const float* line = p.cos_sin;
  if (line != nullptr) line += static_cast<int64_t>(p.rows[token]) * p.rotary;
  RawChunk<T> raw[Heads][2];
#pragma unroll
  for (int h = 0; h < Heads; ++h) {
    const int index = first_head + h * kGroups;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      raw[h][k] = {};
      if (index < end_head && c.exists[k]) raw[h][k] = load_chunk(from[k] + h * kGroups * p.dim);
    }
  }
  const Lines<T, Byte> to(p, plan.page, token);
  float cosines[kChunk], sines[kChunk];
  if (Chunked && line != nullptr) load_rotation(p, c, line, cosines, sines);
  pdl_trigger();
  if (norm) __syncthreads();

#pragma unroll
  for (int h = 0; h < Heads; ++h) {
    if (h >= plan.passes) break;
    const int index = first_head + h * kGroups;
    const Head head = head_at(p, index);
    float y[2 * kChunk];
    unpack_chunk<T>(raw[h][0], y);
    unpack_chunk<T>(raw[h][1], y + kChunk);
    float factor = 1.f;
    if (norm) {
      float squares[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 2 * kChunk; ++i) squares[i / kChunk] = fmaf(y[i], y[i], squares[i / kChunk]);
      const float sum = warp_reduce<SumOp, Lanes>(squares[0] + squares[1], SumOp{});
      if (head.kind != kV) {
        if ((head.kind == kQ ? p.q_weight : p.k_weight) != nullptr) factor = rsqrtf(fmaf(sum, plan.inverse_dim, p.eps));
        scale_chunks(c, weights[head.kind], factor, y);
      }
    }
    if (index >= end_head) continue;
    if (line != nullptr && head.kind != kV) {
      if constexpr (Chunked) {
        rotate_chunks(p, c, y, cosines, sines);
      } else {
        rotate_scalar(p, c, row + index * p.dim, line, factor, norm ? weights[head.kind] : nullptr, y);
      }
    }
    float inverse = 1.f;
    if constexpr (Byte) {
      const float* const scale = head.kind == kK ? p.k_scale : p.v_scale;
      const int step = head.kind == kK ? p.k_scale_step : p.v_scale_step;
      if (head.kind != kQ && scale != nullptr) inverse = 1.f / scale[head.local * step];
    }
    store_head<T, Byte>(p, to, c, head, inverse, y);
  }
}

template <class T, int Lanes, int Heads, bool Chunked, bool Byte>
void launch_rope(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  constexpr int kGroups = kRopeThreads / Lanes;
  const int all = (p.heads + 2 * p.kv_heads + kGroups - 1) / kGroups;  // passes over a row
  const bool spread = p.tokens * all <= static_cast<int64_t>(sm_count()) * kRopeSpreadCtas;
  const int pieces = spread ? all : (all + Heads - 1) / Heads;
  const int turning = p.interleaved ? 0 : p.rotary / (2 * kChunk);
  const int rest = (p.dim - 2 * kChunk * turning + 2 * kChunk - 1) / (2 * kChunk);
  const RopePlan plan{(all + pieces - 1) / pieces, turning, rest, 1.f / static_cast<float>(p.dim), row_split(std::max(p.page, 1))};
  launch("qk_norm_rope_append", {dim3(static_cast<unsigned>(p.tokens), static_cast<unsigned>(pieces)), kRopeThreads}, stream,
         qk_norm_rope_append_kernel<T, Lanes, Heads, Chunked, Byte>, p, plan);
}

template <class T, bool Byte>
void launch_qk_norm_rope_append(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  constexpr int kHeads = sizeof(T) == 4 ? (kRopeHeads + 1) / 2 : kRopeHeads;
  if (p.rotary % (p.interleaved ? kChunk : 2 * kChunk) != 0) {
    launch_rope<T, 16, 1, false, Byte>(p, stream);
  } else if (p.dim <= 64) {
    launch_rope<T, 4, kHeads, true, Byte>(p, stream);
  } else if (p.dim <= 128) {
    launch_rope<T, 8, kHeads, true, Byte>(p, stream);
  } else {
    launch_rope<T, 16, kHeads, true, Byte>(p, stream);
  }
}

}  // namespace pyllm::fused
