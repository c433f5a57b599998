// The mathematics of a warp: flash attention over 16 or 32 keys a step, operands swapped: keys are the 16-row side of the mma, the query
// rows of a KV head (group x rows of the sequence) the 8-column side.
//   S^T [16 keys x 8 rows] = K Q^T, Q^T in registers; a row's maximum is a butterfly over 8 lanes
//   O^T [D x 8 rows] += V^T P^T, V^T by transposing ldmatrix, P^T by movmatrix from the accumulators of S^T
// One-byte caches are widened to fp16 in registers: 4 neighbouring bytes of a lane are one row of two k pairs of K, and, transposed in
// pairs of bytes, two keys of an even and an odd dimension of V. Scales go to the scores and to the result.
#pragma once
#include "attention/decode_shape.cuh"

namespace pyllm::attention {

// The query rows of a segment in registers, and what a warp has gathered over its keys.
template <class S>
struct Rows {
  using Cache = typename S::Cache;
  using Math = typename S::Math;
  using Scores = float[S::kRowTiles][S::kTiles][4];
  static constexpr int kTileBytes = kTileKeys * S::kPitch * 16;

  uint32_t q[S::kRowTiles][S::kBlocks][2];
  int high[S::kRowTiles][2];   // the last key that columns 2j, 2j + 1 see; -1: no such row
  float top[S::kRowTiles][2];  // their maxima, in powers of two
  float sum[S::kRowTiles][2];  // of this lane's keys
  float o[S::kRowTiles][S::kBlocks][4];
  float key_scale, value_scale;  // of the caches
  float score_scale, cap;        // exponent = s * score_scale, or cap * tanh(s * score_scale)

  // Asks for the query rows of a segment and the scale of its keys. Nothing that the end of the segment before it uses is touched.
  __device__ __forceinline__ void ask(const DecodeAttentionParams& p, const Cursor& at, int lane) {
    key_scale = p.k_scale != nullptr ? p.k_scale[at.head * p.k_scale_step] : 1.f;
    const int r = lane / 4, j = lane % 4;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      const QueryRow row = query_row(p, at, n * kRowTile + r);
      const uint16_t* from =
          static_cast<const uint16_t*>(p.q) + static_cast<int64_t>(at.s.q_start + row.j) * p.q_token_stride + row.head * p.q_head_stride;
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
        q[n][d][0] = q[n][d][1] = 0;
        if (!row.exists) continue;
        if constexpr (S::kWide) {
          const uint2 four = *reinterpret_cast<const uint2*>(from + d * 16 + j * 4);
          q[n][d][0] = four.x;
          q[n][d][1] = four.y;
        } else {
          q[n][d][0] = *reinterpret_cast<const uint32_t*>(from + d * 16 + j * 2);
          q[n][d][1] = *reinterpret_cast<const uint32_t*>(from + d * 16 + j * 2 + 8);
        }
      }
    }
  }

  // Nothing gathered yet.
  __device__ __forceinline__ void clear(const DecodeAttentionParams& p, const Cursor& at, int lane) {
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const QueryRow column = query_row(p, at, n * kRowTile + lane % 4 * 2 + e);
        high[n][e] = column.exists ? at.s.length - at.s.rows + column.j : -1;
        top[n][e] = -INFINITY;
        sum[n][e] = 0.f;
      }
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][d][e] = 0.f;
      }
    }
    value_scale = p.v_scale != nullptr ? p.v_scale[at.head * p.v_scale_step] : 1.f;
  }

  // What another one has asked for.
  __device__ __forceinline__ void take(const Rows& asked) {
    key_scale = asked.key_scale;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) q[n][d][0] = asked.q[n][d][0], q[n][d][1] = asked.q[n][d][1];
    }
  }

  // Once the keys are under way: what ask() has asked for is not touched before.
  __device__ __forceinline__ void convert(const DecodeAttentionParams& p) {
    constexpr float kLog2E = 1.4426950408889634f;
    score_scale = p.scale * key_scale * (p.softcap > 0.f ? 1.f / p.softcap : kLog2E);
    cap = p.softcap * kLog2E;
    if (!S::kWide || !is_bf16<S>(p)) return;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) q[n][d][0] = to_half_pair(q[n][d][0]), q[n][d][1] = to_half_pair(q[n][d][1]);
    }
  }

  // S^T of a step: s[n][t] is C of row tile n and key tile t.
  __device__ __forceinline__ void scores(uint32_t keys, int lane, Scores& s) const {
    float odd[S::kRowTiles][S::kTiles][4];  // a second chain of products
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][t][e] = odd[n][t][e] = 0.f;
      }
    }
    const int row = lane & 15, side = lane / 16;
    if constexpr (S::kWide) {
#pragma unroll
      for (int d = 0; d < S::kBlocks; d += 2) {
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          uint32_t raw[4];  // keys 0-7, 8-15 of block d, then of block d + 1
          load_matrices(raw, keys + t * kTileBytes + place_of<S>(row, d + side));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t near = raw[2 * i], far = raw[2 * i + 1];
            const uint32_t a[4] = {widen<Cache, 0, 1>(near), widen<Cache, 0, 1>(far), widen<Cache, 2, 3>(near), widen<Cache, 2, 3>(far)};
#pragma unroll
            for (int n = 0; n < S::kRowTiles; ++n) mma<Math>(i == 0 ? s[n][t] : odd[n][t], a, q[n][d + i]);
          }
        }
      }
    } else {
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          uint32_t a[4];
          load_matrices(a, keys + t * kTileBytes + place_of<S>(row, 2 * d + side));
#pragma unroll
          for (int n = 0; n < S::kRowTiles; ++n) mma<Math>(d % 2 == 0 ? s[n][t] : odd[n][t], a, q[n][d]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][t][e] = (s[n][t][e] + odd[n][t][e]) * score_scale;
      }
    }
  }

  // Scores to weights 2^(exponent - maximum + kLift), in place; earlier sums and o move to the new maxima.
  __device__ __forceinline__ void weigh(const DecodeAttentionParams& p, const Cursor& at, int first_key, int lane, Scores& s) {
    if (p.softcap > 0.f) cap_scores(s);
    // All rows see the keys before the new ones (of which a mask may hide any), down to length - window.
    if (first_key + S::kStepKeys > at.s.length - at.s.rows || (p.window > 0 && first_key <= at.s.length - 1 - p.window)) {
      hide(p, at, first_key, lane, s);
    }
    float now[S::kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float m = fmaxf(s[n][0][e], s[n][0][e + 2]);
#pragma unroll
        for (int t = 1; t < S::kTiles; ++t) m = fmaxf(m, fmaxf(s[n][t][e], s[n][t][e + 2]));
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, offset));
        now[n][e] = fmaxf(m, top[n][e]);
        moved |= now[n][e] > top[n][e];
      }
    }
    if (__any_sync(kAllLanes, moved)) {
#pragma unroll
      for (int n = 0; n < S::kRowTiles; ++n) {
        float factor[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          factor[e] = now[n][e] > top[n][e] ? exp2_fast(top[n][e] - now[n][e]) : 1.f;
          top[n][e] = now[n][e];
          sum[n][e] *= factor[e];
        }
#pragma unroll
        for (int d = 0; d < S::kBlocks; ++d) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[n][d][e] *= factor[e % 2];
        }
      }
    }
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float reference = top[n][e] == -INFINITY ? 0.f : top[n][e] - S::kLift;
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          s[n][t][e] = exp2_fast(s[n][t][e] - reference);
          s[n][t][e + 2] = exp2_fast(s[n][t][e + 2] - reference);
          sum[n][e] += s[n][t][e] + s[n][t][e + 2];
        }
      }
    }
  }

  // O^T += V^T P^T.
  __device__ __forceinline__ void add_values(uint32_t values, int lane, const Scores& s) {
    uint32_t weights[S::kRowTiles][S::kTiles][2];
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) weights[n][t][i] = transpose_matrix(pack_pair(s[n][t][2 * i], s[n][t][2 * i + 1], Math{}));
      }
    }
    if constexpr (S::kWide) {
      const int row = lane & 15, side = lane / 16;
#pragma unroll
      for (int d = 0; d < S::kBlocks; d += 2) {
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          uint32_t raw[4];  // keys 0-7, 8-15 of block d, then of block d + 1; bytes: key 2j of dimensions 2r, 2r + 1, then key 2j + 1
          load_matrices_transposed(raw, values + t * kTileBytes + place_of<S>(row, d + side));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t near = raw[2 * i], far = raw[2 * i + 1];
            const uint32_t a[4] = {widen<Cache, 0, 2>(near), widen<Cache, 1, 3>(near), widen<Cache, 0, 2>(far), widen<Cache, 1, 3>(far)};
#pragma unroll
            for (int n = 0; n < S::kRowTiles; ++n) mma<Math>(o[n][d + i], a, weights[n][t]);
          }
        }
      }
    } else {
      const int row = lane % 8 + lane / 16 * 8, side = lane / 8 % 2;
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
          uint32_t a[4];
          load_matrices_transposed(a, values + t * kTileBytes + place_of<S>(row, 2 * d + side));
#pragma unroll
          for (int n = 0; n < S::kRowTiles; ++n) mma<Math>(o[n][d], a, weights[n][t]);
        }
      }
    }
  }

  // The dimension of o[.][block][e] in this lane.
  static __device__ __forceinline__ int dimension(int block, int e, int lane) {
    return block * 16 + (S::kWide ? lane / 4 * 2 + e / 2 : lane / 4 + e / 2 * 8);
  }

 private:
  // tanh(x) = 1 - 2 / (e^2x + 1): absolute error 2^-22, where tanh.approx has 2^-11, which a cap of 50 makes a 2.4 % error of exp.
  __device__ __forceinline__ void cap_scores(Scores& s) const {
    asm volatile("" ::: "memory");  // a branch, not predicates: most calls have no cap
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][t][e] = cap - 2.f * cap * reciprocal_fast(exp2_fast(s[n][t][e] * 2.885390081777927f) + 1.f);
      }
    }
  }

  // Keys that a row does not see: past its own, below its window, or not in its mask.
  __device__ __forceinline__ void hide(const DecodeAttentionParams& p, const Cursor& at, int first_key, int lane, Scores& s) const {
    asm volatile("" ::: "memory");
    const int window = p.window > 0 ? p.window : 1 << 30, masked = at.s.length - at.s.rows;
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int last = high[n][e];
        uint64_t word = ~0ull;
        if (p.mask_words > 0 && last >= 0) {
          const uint32_t* const bits = p.mask + (at.s.q_start + query_row(p, at, n * kRowTile + lane % 4 * 2 + e).j) * p.mask_stride;
          word = bits[0] | (p.mask_words > 1 ? static_cast<uint64_t>(bits[1]) << 32 : 0);
        }
#pragma unroll
        for (int t = 0; t < S::kTiles; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int key = first_key + t * kTileKeys + lane / 4 + half * 8;
            const bool seen = key <= last && key > last - window && (key < masked || (word >> ((key - masked) & 63) & 1) != 0);
            if (!seen) s[n][t][e + 2 * half] = -INFINITY;
          }
        }
      }
    }
  }
};

}  // namespace pyllm::attention
