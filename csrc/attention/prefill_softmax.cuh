// The softmax of prefill: one warpgroup holds 64 rows of scores as wgmma leaves them, 4 lanes share a row. Exponents are of 2, with
// log2(e) folded into the scale.
// A row keeps a reference exponent instead of its exact maximum and raises it only when the maximum has outgrown it by 2^8: weights stay
// below 256 with the same relative precision, and the sums are rescaled in the first blocks of a tile instead of in every block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/prefill_attention.h"

namespace pyllm::attention {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kSlack = 8.f;
// What a lane's weights of a block may add up to before the reference is raised, where nobody looks at the maxima: so that no weight
// overflows fp16 (2^16), or in bf16, which has fp32's range, no sum of them times values does.
template <class T>
constexpr float kMostWeight = std::is_same_v<T, __nv_bfloat16> ? 18446744073709551616.f : 32768.f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t r;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

// Rows h = 0, 1 of a thread: l / 4 and l / 4 + 8 of its warp's 16.
struct RowSoftmax {
  float top[2] = {-INFINITY, -INFINITY};  // the largest score so far, of this row
  float reference[2] = {0.f, 0.f};        // scaled; 0 before the row has seen a key
  float sum[2] = {0.f, 0.f};              // of this lane's columns

  template <int Size>
  __device__ __forceinline__ static float row_max(const float (&s)[Size], int h) {
    float most = s[2 * h];
#pragma unroll
    for (int i = 0; i < Size; i += 4) most = fmaxf(most, fmaxf(s[i + 2 * h], s[i + 2 * h + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
  }

  // Looks at the scores of a block. factor: what the sums so far are to be multiplied by, exactly 1 in most blocks. True if any row of
  // the warp has another one.
  template <int Size>
  __device__ __forceinline__ bool raise(const float (&s)[Size], float scale, float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = row_max(s, h);
      const bool first = top[h] == -INFINITY;
      top[h] = fmaxf(top[h], most);
      const float scaled = top[h] == -INFINITY ? 0.f : top[h] * scale;
      const float next = first || scaled > reference[h] + kSlack ? scaled : reference[h];
      factor[h] = first ? 1.f : exp2_fast(reference[h] - next);  // before the first key there is nothing to multiply
      reference[h] = next;
      sum[h] *= factor[h];
    }
    return __any_sync(0xffffffffu, factor[0] != 1.f || factor[1] != 1.f);
  }

  // Moves the reference of the rows of which any lane is `over` to the largest score of this block.
  template <int Size>
  __device__ __forceinline__ void raise_over(const float (&s)[Size], float scale, const bool (&over)[2], float (&factor)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t all = __ballot_sync(0xffffffffu, over[h]), quad = all >> (threadIdx.x % 32 & ~3u) & 15u;
      float next = reference[h];
      if (all != 0) {  // the whole warp looks, since its shuffles are the whole warp's
        const float most = row_max(s, h) * scale;
        if (quad != 0) next = most;
      }
      factor[h] = quad != 0 ? exp2_fast(reference[h] - next) : 1.f;
      reference[h] = next;
      sum[h] *= factor[h];
    }
  }

  // Scores become weights, in place.
  template <int Size>
  __device__ __forceinline__ void exponentiate(float (&s)[Size], float scale) {
#pragma unroll
    for (int i = 0; i < Size; i += 2) {
      const int h = i / 2 % 2;
      s[i] = exp2_fast(fmaf(s[i], scale, -reference[h]));
      s[i + 1] = exp2_fast(fmaf(s[i + 1], scale, -reference[h]));
      sum[h] += s[i] + s[i + 1];
    }
  }

  // Scores become weights: two to a register, as the A operand of the next product wants them. `into` takes their sums.
  template <class T, int Size>
  __device__ __forceinline__ void weigh(const float (&s)[Size], float scale, uint32_t (&w)[Size / 2], float (&into)[2]) const {
#pragma unroll
    for (int i = 0; i < Size; i += 2) {
      const int h = i / 2 % 2;
      const float x = exp2_fast(fmaf(s[i], scale, -reference[h])), y = exp2_fast(fmaf(s[i + 1], scale, -reference[h]));
      into[h] += x + y;
      w[i / 2] = pack<T>(x, y);
    }
  }

  // What the row's sum of values is multiplied by, and its LSE. sink: the head's logit, or null.
  __device__ __forceinline__ float finish(int h, const float* sink, float& lse) {
    float total = sum[h];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    float high = reference[h], factor = 1.f;
    if (sink != nullptr) {
      const float logit = *sink * kLog2E;
      high = total > 0.f ? fmaxf(reference[h], logit) : logit;
      factor = total > 0.f ? exp2_fast(reference[h] - high) : 0.f;
      total = total * factor + (logit == -INFINITY ? 0.f : exp2_fast(logit - high));
    }
    const bool none = !(total > 0.f) && total == total;
    lse = none ? -INFINITY : (high + log2f(total)) * kLn2;
    return none ? 0.f : factor / total;
  }
};

// One row's view of the mask of a tree.
struct MaskRow {
  const uint32_t* words;
  int begin, count;  // key of bit 0; words
  // 32 bits from key `key` on; keys outside the bits are allowed.
  __device__ __forceinline__ uint32_t bits(int key) const {
    const int at = key - begin, word = at >> 5, shift = at & 31;
    const uint32_t low = word >= 0 && word < count ? words[word] : 0xffffffffu;
    const uint32_t high = word + 1 >= 0 && word + 1 < count ? words[word + 1] : 0xffffffffu;
    return __funnelshift_r(low, high, shift);
  }
};

// cap * tanh(s / cap) of scaled scores, in exponents of 2. tanh(x) = 1 - 2 / (1 + e^2x): the hardware's own tanh errs by 2^-11.
template <int Size>
__device__ __forceinline__ void soft_cap(float (&s)[Size], float scale, float cap) {
  const float inner = 2.f * scale * kLog2E / cap, outer = cap * kLog2E;
#pragma unroll
  for (int i = 0; i < Size; ++i) s[i] = fmaf(-2.f * outer, reciprocal_fast(1.f + exp2_fast(s[i] * inner)), outer);
}

// Columns >= end[h] or < low[h] of the block are not seen by row h.
template <int Size>
__device__ __forceinline__ void mask_columns(float (&s)[Size], const int (&low)[2], const int (&end)[2]) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < Size; ++i) {
    const int at = 8 * (i / 4) + i % 2, h = i / 2 % 2;
    if (at >= end[h] - column || at < low[h] - column) s[i] = -INFINITY;
  }
}
template <int Size>
__device__ __forceinline__ void mask_columns(float (&s)[Size], const int (&end)[2]) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < Size; ++i) {
    const int at = 8 * (i / 4) + i % 2, h = i / 2 % 2;
    if (at >= end[h] - column) s[i] = -INFINITY;
  }
}
template <int Size>
__device__ __forceinline__ void mask_bits(float (&s)[Size], int key, const MaskRow (&rows)[2]) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int word = 0; word < Size / 16; ++word) {
      const uint32_t bits = rows[h].bits(key + 32 * word) >> column;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int i = 16 * word + 4 * (j / 2) + 2 * h + j % 2;
        if (i < Size && !(bits >> (8 * (j / 2) + j % 2) & 1)) s[i] = -INFINITY;
      }
    }
    if constexpr (Size % 16 != 0) {
      const uint32_t bits = rows[h].bits(key + 32 * (Size / 16)) >> column;
#pragma unroll
      for (int i = Size / 16 * 16; i < Size; ++i) {
        if (i / 2 % 2 == h && !(bits >> (8 * (i % 16 / 4) + i % 2) & 1)) s[i] = -INFINITY;
      }
    }
  }
}

}  // namespace pyllm::attention
