// Online softmax of the FP8 prefill: per thread two rows (g and g + 8 of a warp's 16) of a tile of scores in wgmma's accumulator layout.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/prefill_attention.h"
#include "attention/prefill_fp8_load.cuh"

namespace pyllm::fp8 {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
// P = 2^(s - max + kOffset) is in (0, 256]: e4m3 reaches from 2^-9 to 448, so weights down to 2^-17 of the largest one count.
constexpr float kOffset = 8.f;

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// tanh through exp2 and a reciprocal: absolute error about 1e-6 (tanh.approx: 5e-4, too much under a cap of 50).
__device__ __forceinline__ float tanh_fast(float x) { return 1.f - __fdividef(2.f, 1.f + exp2_fast(2.f * kLog2e * x)); }

// Four e4m3 bytes, the first argument lowest.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

template <int Keys, bool Capped>
struct Softmax {
  float max[2], sum[2];  // max in units of the raw product, or of its tanh
  float slope[2];        // log2 units of the exponent per unit of max
  float cap_slope[2];    // capped: raw product -> argument of tanh

  __device__ __forceinline__ Softmax(const PrefillAttentionParams& p, const Item& item, int row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float scale = p.scale;
      if (item.sequence < p.batch && row + 8 * h < item.rows) {
        const int64_t token = item.token + row + 8 * h;
        if (p.q_scale != nullptr) scale *= p.q_scale[token * p.q_scale_token_step + item.head * p.q_scale_head_step];
        if (p.k_scale != nullptr) scale *= p.k_scale[item.sequence * p.k_scale_batch_step + item.kv_head * p.k_scale_head_step];
      }
      if constexpr (Capped) {
        cap_slope[h] = scale / p.softcap;
        slope[h] = p.softcap * kLog2e;
      } else {
        slope[h] = fmaxf(scale * kLog2e, 1e-30f);  // 0 * -inf is not a number
      }
      max[h] = -INFINITY;
      sum[h] = 0.f;
    }
  }

  static __device__ __forceinline__ void mask_tile(const PrefillAttentionParams& p, const Item& item, int row, float (&s)[Keys / 2],
                                                   int tile) {
    const int first = tile * Keys + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = item.position + row + 8 * h, low = p.window > 0 ? ::max(at - p.window + 1, 0) : 0;
      const unsigned span = ::max((p.causal ? min(item.keys, at + 1) : item.keys) - low, 0);
#pragma unroll
      for (int i = 0; i < Keys / 4; ++i) {
        if (static_cast<unsigned>(first + i / 2 * 8 + i % 2 - low) >= span) s[i / 2 * 4 + 2 * h + i % 2] = -INFINITY;
      }
      if (p.mask == nullptr || row + 8 * h >= item.rows) continue;
      const uint32_t* words = p.mask + (item.token + row + 8 * h) * p.mask_stride;
#pragma unroll
      for (int i = 0; i < Keys / 32; ++i) {
        const int bit = tile * Keys + 32 * i - item.bits_from, word = bit >> 5;
        const auto at_word = [&](int w) { return w >= 0 && w < p.mask_words ? words[w] : ~0u; };
        const uint32_t bits = __funnelshift_r(at_word(word), at_word(word + 1), bit) >> threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if ((bits >> (j / 2 * 8 + j % 2) & 1) == 0) s[16 * i + j / 2 * 4 + 2 * h + j % 2] = -INFINITY;
        }
      }
    }
  }

  // The largest of the running maximum and the scores, per row over the four lanes that share it. As integers two scores cost one
  // instruction (VIMNMX3) instead of two of the same rate, and order floats rightly as soon as one of them is not negative; else the
  // warp looks again.
  __device__ __forceinline__ void find_max(const float (&s)[Keys / 2], float (&most)[2]) const {
    int top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int a = __float_as_int(max[h]), b = a;
#pragma unroll
      for (int i = 0; i < Keys / 8; i += 2) {
        a = ::max(::max(a, __float_as_int(s[4 * i + 2 * h])), __float_as_int(s[4 * i + 2 * h + 1]));
        b = ::max(::max(b, __float_as_int(s[4 * i + 4 + 2 * h])), __float_as_int(s[4 * i + 4 + 2 * h + 1]));
      }
      top[h] = ::max(a, b);
      top[h] = ::max(top[h], __shfl_xor_sync(0xffffffff, top[h], 1));
      top[h] = ::max(top[h], __shfl_xor_sync(0xffffffff, top[h], 2));
      most[h] = __int_as_float(top[h]);
    }
    if (__any_sync(0xffffffff, (top[0] | top[1]) < 0)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = max[h];
#pragma unroll
        for (int i = 0; i < Keys / 4; ++i) m = fmaxf(m, s[i / 2 * 4 + 2 * h + i % 2]);
        m = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 1));
        most[h] = fmaxf(m, __shfl_xor_sync(0xffffffff, m, 2));
      }
    }
  }

  // Looks at the scores of a tile, masked already. alpha: what earlier sums are to be multiplied with; bias: of the exponents.
  __device__ __forceinline__ void look(const float (&s)[Keys / 2], float (&alpha)[2], float (&bias)[2]) {
    float most[2];
    find_max(s, most);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float m = most[h];
      const float reference = m == -INFINITY ? 0.f : m;
      alpha[h] = exp2_fast((max[h] - reference) * slope[h]);
      max[h] = m;
      bias[h] = fmaf(-reference, slope[h], kOffset);
    }
  }
  static __device__ __forceinline__ void mask(const PrefillAttentionParams& p, const Item& item, int row, float (&s)[Keys / 2], int tile) {
    if (tile < item.plain_from || tile >= item.plain_upto) mask_tile(p, item, row, s, tile);
  }
  // Scores in, P (times 2^kOffset) out.
  __device__ __forceinline__ void weigh(float (&s)[Keys / 2], const float (&bias)[2]) const {
#pragma unroll
    for (int i = 0; i < Keys / 2; ++i) s[i] = exp2_fast(fmaf(s[i], slope[i / 2 % 2], bias[i / 2 % 2]));
  }
  // All of it.
  __device__ __forceinline__ void step(const PrefillAttentionParams& p, const Item& item, int row, float (&s)[Keys / 2], int tile,
                                       float (&alpha)[2]) {
    if constexpr (Capped) {
#pragma unroll
      for (int i = 0; i < Keys / 2; ++i) s[i] = tanh_fast(s[i] * cap_slope[i / 2 % 2]);
    }
    mask(p, item, row, s, tile);
    float bias[2];
    look(s, alpha, bias);
    weigh(s, bias);
  }

  // Adds a tile's P to the sums. Apart from step(): an addition right behind each exponential waits for the latter's latency.
  __device__ __forceinline__ void add(const float (&s)[Keys / 2], const float (&alpha)[2]) {
    float part[2][2] = {};
#pragma unroll
    for (int i = 0; i < Keys / 2; ++i) part[i / 2 % 2][i % 2] += s[i];
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], alpha[h], part[h][0] + part[h][1]);
  }

  static __device__ __forceinline__ void pack(uint32_t (&packed)[Keys / 32][4], const float (&s)[Keys / 2]) {
#pragma unroll
    for (int i = 0; i < Keys / 32; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* x = s + 16 * i + r / 2 * 8 + r % 2 * 2;
        packed[i][r] = pack_e4m3(x[0], x[1], x[4], x[5]);
      }
    }
  }

  // factor: of a row of O; lse: its natural-log sum.
  __device__ __forceinline__ void finish(const PrefillAttentionParams& p, const Item& item, float (&factor)[2], float (&lse)[2]) const {
    float v_scale = 1.f;
    if (p.v_scale != nullptr && item.sequence < p.batch) {
      v_scale = p.v_scale[item.sequence * p.v_scale_batch_step + item.kv_head * p.v_scale_head_step];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float total = sum[h];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      const bool none = max[h] == -INFINITY;
      const bool sink = p.sinks != nullptr && item.sequence < p.batch;
      const float logit = sink ? p.sinks[item.head] * kLog2e : -INFINITY;
      float top = none ? logit : max[h] * slope[h] - kOffset, shrink = 1.f;
      if (sink && !none) {
        const float lift = fmaxf(logit - top, 0.f);
        shrink = exp2_fast(-lift);
        total = total * shrink + exp2_fast(logit - top - lift);
        top += lift;
      }
      factor[h] = none ? 0.f : v_scale * shrink / total;
      lse[h] = (top + (none ? 0.f : log2f(total))) * kLn2;
    }
  }
};

}  // namespace pyllm::fp8
