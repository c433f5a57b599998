// decode_attention: o = softmax(cap tanh(scale q k^T / cap) + mask) v for a few query rows per sequence over a paged cache.
//
// Bound by the read of the cache, so everything serves that stream. A CTA of 4 warps walks over its tiles (decode_work.cuh) of 64 keys of
// one KV head, warp w over keys 16 w .. 16 w + 15 of each: each warp is its own flash attention with its own ring of `kStages` steps
// (16 keys and values, 16-byte cp.async, 96 KiB a CTA, two CTAs an SM), without a barrier in the loop; the ring runs on across segments.
// Operands are swapped: keys are the 16-row side of the mma, the query rows of a KV head (group x rows of the sequence) the 8-column side.
//   S^T [16 keys x 8 rows] = K Q^T, Q^T in registers; a row's maximum is a butterfly over 8 lanes
//   O^T [D x 8 rows] += V^T P^T, V^T by transposing ldmatrix, P^T by movmatrix from the accumulators of S^T
// fp8 caches are widened to fp16 in registers: 4 neighbouring bytes of a lane are one row of two k pairs of K, and, transposed in pairs of
// bytes, two keys of an even and an odd dimension of V. Scales go to the scores and to the result.
// Keys beyond the length, or below the window of the first row, are never read: zeros stand in for them (0 x NaN of an unused slot is NaN).
// At the end of a segment the warps merge through shared memory in a fixed order; whole segments go to `out`, pieces to `partial`.
// Limits: D 64, 128, 256; P a power of two >= 16; rows beyond 8 row_tiles per KV head take another pass over the keys, through L2.
#pragma once
#include <cuda_fp8.h>

#include <type_traits>

#include "attention/decode_work.cuh"
#include "attention/mma.cuh"
#include "common/launch.h"
#include "common/vec.cuh"

namespace pyllm::attention {

// CTAs per SM: what their rings (192 KiB together) and exchange buffers leave room for.
constexpr int decode_ctas(int dim) { return dim == 256 ? 1 : 2; }

template <class Q, class Cache, int Dim, int RowTiles>
struct DecodeShape {
  static constexpr bool kFp8 = std::is_same_v<Cache, __nv_fp8_e4m3>;
  using Math = std::conditional_t<kFp8, __half, Q>;                        // of the mma
  static constexpr int kRowBytes = Dim * static_cast<int>(sizeof(Cache));  // of one key
  static constexpr int kChunks = kRowBytes / 16;                           // of 16 bytes
  static constexpr int kHalf = kStepKeys * kRowBytes;                      // keys of a step, then its values
  static constexpr int kCtas = decode_ctas(Dim);
  static constexpr int kStages = 48 / kCtas * 1024 / (2 * kHalf);
  static constexpr int kBlocks = Dim / 16;             // 16-dimension blocks
  static constexpr int kOwnBlocks = kBlocks / kWarps;  // of which a warp writes so many
  static constexpr int kRows = RowTiles * kRowTile;
  static constexpr int kRing = kWarps * kStages * 2 * kHalf;
  static constexpr int kExchange = kWarps * kBlocks * 32 * 16;  // a float4 per warp, block and lane
  static constexpr int kSmem = kRing + kExchange + kWarps * kRows * static_cast<int>(sizeof(float2));
  // fp16 weights are kept 2^8 larger: those down to 2^-22 of the largest stay normal numbers.
  static constexpr float kLift = std::is_same_v<Math, __half> ? 8.f : 0.f;
  static_assert(kStages >= 2 && kBlocks % kWarps == 0);
};

// Where chunk `chunk` of row `row` lies: 8 rows of one chunk, as ldmatrix reads them, fall into different banks.
template <int Chunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return (row * Chunks + (Chunks >= 8 ? chunk ^ (row & 7) : chunk ^ ((row / 2) & 3))) * 16;
}

__device__ __forceinline__ uint32_t pack_pair(float lo, float hi, __half) {
  const __half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t pack_pair(float lo, float hi, __nv_bfloat16) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&h);
}
// Two e4m3 to two fp16, exactly.
__device__ __forceinline__ uint32_t widen(uint32_t two) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  return static_cast<uint32_t>(h.x) | static_cast<uint32_t>(h.y) << 16;
}
template <class Q>
__device__ __forceinline__ uint32_t to_half_pair(uint32_t two) {
  if constexpr (std::is_same_v<Q, __half>) return two;
  constexpr float kMax = 65504.f;
  const float lo = __uint_as_float(two << 16), hi = __uint_as_float(two & 0xffff0000u);
  return pack_pair(fminf(fmaxf(lo, -kMax), kMax), fminf(fmaxf(hi, -kMax), kMax), __half{});
}

// Fills a warp's ring: one step of the walk per call of issue().
template <class S, class Cache>
struct Loader {
  Cursor at;
  int pages;  // lane i: page of tile `pages_from` + i
  int pages_from;
  int head_bytes;  // of the KV head in a token

  __device__ __forceinline__ void fetch_pages(const DecodeAttentionParams& p, int warp, int lane) {
    const int tile = at.tile + lane, key = tile * kTileKeys + warp * kStepKeys;
    const bool read = tile < at.s.first + at.s.tiles && key < at.s.length && key + kStepKeys > at.s.low;
    pages = read ? p.page_table[at.b * p.table_stride + (key >> p.page_shift)] : 0;
    pages_from = at.tile;
    head_bytes = at.unit / p.chunks * S::kRowBytes;
  }

  __device__ __forceinline__ void issue(const DecodeAttentionParams& p, int warp, int lane, uint32_t slot) {
    if (at.left == 0) return;
    const int key = at.tile * kTileKeys + warp * kStepKeys;
    if (key < at.s.length && key + kStepKeys > at.s.low) {
      constexpr int kPass = 32 / S::kChunks;  // rows per instruction of the warp
      const int64_t page = __shfl_sync(kAllLanes, pages, at.tile - pages_from);
      const int row0 = lane / S::kChunks, chunk = lane % S::kChunks;
      const int key_stride = p.kv_heads * S::kRowBytes;
      const int64_t inside = static_cast<int64_t>((key & ((1 << p.page_shift) - 1)) + row0) * key_stride + head_bytes + chunk * 16;
      const char* k = static_cast<const char*>(p.k_cache) + page * p.k_page_stride * static_cast<int>(sizeof(Cache)) + inside;
      const char* v = static_cast<const char*>(p.v_cache) + page * p.v_page_stride * static_cast<int>(sizeof(Cache)) + inside;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* from = half == 0 ? k : v;
#pragma unroll
        for (int i = 0; i < kStepKeys / kPass; ++i) {
          const int row = row0 + i * kPass;
          const bool read = key + row >= at.s.low && key + row < at.s.length;
          copy_async(slot + half * S::kHalf + swizzled<S::kChunks>(row, chunk), from, read ? 16 : 0);
          from += kPass * key_stride;
        }
      }
    }
    if (--at.left == 0) return;
    ++at.tile;
    const bool turn = at.tile == at.s.first + at.s.tiles;
    if (turn) at.next_segment(p);
    if (turn || at.tile - pages_from == 32) fetch_pages(p, warp, lane);
  }
};

// The query rows of a segment in registers, and what a warp has gathered over its keys.
template <class Q, class Cache, int Dim, int RowTiles>
struct Rows {
  using S = DecodeShape<Q, Cache, Dim, RowTiles>;
  using Math = typename S::Math;

  uint32_t q[RowTiles][S::kBlocks][2];
  int high[RowTiles][2];   // the last key that columns 2j, 2j + 1 see; -1: no such row
  float top[RowTiles][2];  // their maxima, in powers of two
  float sum[RowTiles][2];  // of this lane's keys
  float o[RowTiles][S::kBlocks][4];
  float score_scale, cap;  // exponent = s * score_scale, or cap * tanh(s * score_scale)

  __device__ __forceinline__ void begin(const DecodeAttentionParams& p, const Cursor& at, int lane) {
    constexpr float kLog2E = 1.4426950408889634f;
    const int r = lane / 4, j = lane % 4;
#pragma unroll
    for (int n = 0; n < RowTiles; ++n) {
      const QueryRow row = query_row(p, at.unit, at.s.rows, n * kRowTile + r);
      const Q* from =
          static_cast<const Q*>(p.q) + static_cast<int64_t>(at.s.q_start + row.j) * p.q_token_stride + row.head * p.q_head_stride;
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
        q[n][d][0] = q[n][d][1] = 0;
        if (!row.exists) continue;
        if constexpr (S::kFp8) {
          const uint2 four = *reinterpret_cast<const uint2*>(from + d * 16 + j * 4);
          q[n][d][0] = to_half_pair<Q>(four.x);
          q[n][d][1] = to_half_pair<Q>(four.y);
        } else {
          q[n][d][0] = *reinterpret_cast<const uint32_t*>(from + d * 16 + j * 2);
          q[n][d][1] = *reinterpret_cast<const uint32_t*>(from + d * 16 + j * 2 + 8);
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const QueryRow column = query_row(p, at.unit, at.s.rows, n * kRowTile + j * 2 + e);
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
    score_scale = p.scale;
    if (p.k_scale != nullptr) score_scale *= p.k_scale[at.unit / p.chunks * p.k_scale_step];
    score_scale *= p.softcap > 0.f ? 1.f / p.softcap : kLog2E;
    cap = p.softcap * kLog2E;
  }

  // S^T of 16 keys: s[n] is C of row tile n.
  __device__ __forceinline__ void scores(uint32_t keys, int lane, float (&s)[RowTiles][4]) const {
    float odd[RowTiles][4];  // a second chain of products
#pragma unroll
    for (int n = 0; n < RowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = odd[n][e] = 0.f;
    }
    const int row = lane & 15, side = lane / 16;
    if constexpr (S::kFp8) {
#pragma unroll
      for (int d = 0; d < S::kBlocks; d += 2) {
        uint32_t raw[4];  // keys 0-7, 8-15 of block d, then of block d + 1
        load_matrices(raw, keys + swizzled<S::kChunks>(row, d + side));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t a[4] = {widen(raw[2 * i]), widen(raw[2 * i + 1]), widen(raw[2 * i] >> 16), widen(raw[2 * i + 1] >> 16)};
#pragma unroll
          for (int n = 0; n < RowTiles; ++n) mma<Math>(i == 0 ? s[n] : odd[n], a, q[n][d + i]);
        }
      }
    } else {
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
        uint32_t a[4];
        load_matrices(a, keys + swizzled<S::kChunks>(row, 2 * d + side));
#pragma unroll
        for (int n = 0; n < RowTiles; ++n) mma<Math>(d % 2 == 0 ? s[n] : odd[n], a, q[n][d]);
      }
    }
#pragma unroll
    for (int n = 0; n < RowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] += odd[n][e];
    }
  }

  // Scores to weights 2^(exponent - maximum + kLift), in place; earlier sums and o move to the new maxima.
  __device__ __forceinline__ void weigh(const DecodeAttentionParams& p, int first_key, int lane, float (&s)[RowTiles][4]) {
    const int low = p.window > 0 ? p.window : 1 << 30;
    float now[RowTiles][2];
    bool moved = false;
#pragma unroll
    for (int n = 0; n < RowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = s[n][e] * score_scale;
        // tanh(x) = 1 - 2 / (e^2x + 1): absolute error 2^-22, where tanh.approx has 2^-11, which a cap of 50 makes a 2.4 % error of exp.
        if (p.softcap > 0.f) x = cap - 2.f * cap * reciprocal_fast(exp2_fast(x * 2.885390081777927f) + 1.f);
        const int key = first_key + lane / 4 + e / 2 * 8, last = high[n][e % 2];
        s[n][e] = key <= last && key > last - low ? x : -INFINITY;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float m = fmaxf(s[n][e], s[n][e + 2]);
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, offset));
        now[n][e] = fmaxf(m, top[n][e]);
        moved |= now[n][e] > top[n][e];
      }
    }
    if (__any_sync(kAllLanes, moved)) {
#pragma unroll
      for (int n = 0; n < RowTiles; ++n) {
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
    for (int n = 0; n < RowTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float reference = top[n][e % 2] == -INFINITY ? 0.f : top[n][e % 2] - S::kLift;
        s[n][e] = exp2_fast(s[n][e] - reference);
        sum[n][e % 2] += s[n][e];
      }
    }
  }

  // O^T += V^T P^T.
  __device__ __forceinline__ void add_values(uint32_t values, int lane, const float (&s)[RowTiles][4]) {
    uint32_t weights[RowTiles][2];
#pragma unroll
    for (int n = 0; n < RowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) weights[n][i] = transpose_matrix(pack_pair(s[n][2 * i], s[n][2 * i + 1], Math{}));
    }
    if constexpr (S::kFp8) {
      const int row = lane & 15, side = lane / 16;
#pragma unroll
      for (int d = 0; d < S::kBlocks; d += 2) {
        uint32_t raw[4];  // keys 0-7, 8-15 of block d, then of block d + 1; bytes: key 2j of dimensions 2r, 2r + 1, then key 2j + 1
        load_matrices_transposed(raw, values + swizzled<S::kChunks>(row, d + side));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t near = __byte_perm(raw[2 * i], 0, 0x3120), far = __byte_perm(raw[2 * i + 1], 0, 0x3120);
          const uint32_t a[4] = {widen(near), widen(near >> 16), widen(far), widen(far >> 16)};
#pragma unroll
          for (int n = 0; n < RowTiles; ++n) mma<Math>(o[n][d + i], a, weights[n]);
        }
      }
    } else {
      const int row = lane % 8 + lane / 16 * 8, side = lane / 8 % 2;
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
        uint32_t a[4];
        load_matrices_transposed(a, values + swizzled<S::kChunks>(row, 2 * d + side));
#pragma unroll
        for (int n = 0; n < RowTiles; ++n) mma<Math>(o[n][d], a, weights[n]);
      }
    }
  }

  // The dimension of o[.][block][e] in this lane.
  static __device__ __forceinline__ int dimension(int block, int e, int lane) {
    return block * 16 + (S::kFp8 ? lane / 4 * 2 + e / 2 : lane / 4 + e / 2 * 8);
  }
};

// The end of a segment or piece, tiles [begin_tile, at.tile): the sums of the warps become one and leave the CTA. All threads.
template <class Q, class Cache, int Dim, int RowTiles>
__device__ __forceinline__ void finish_segment(const DecodeAttentionParams& p, const Cursor& at, int begin_tile,
                                               Rows<Q, Cache, Dim, RowTiles>& rows, float4* exchange, float2* sums, int warp, int lane) {
  using R = Rows<Q, Cache, Dim, RowTiles>;
  using S = typename R::S;
  const int j = lane % 4;
  const bool begun = begin_tile == at.s.first, whole = begun && at.tile == at.s.first + at.s.tiles;
#pragma unroll
  for (int n = 0; n < RowTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = rows.sum[n][e];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      if (lane < 4) sums[warp * S::kRows + n * kRowTile + 2 * j + e] = make_float2(rows.top[n][e], sum);
    }
  }
  __syncthreads();
  const int kv_head = at.unit / p.chunks;
  const float v_scale = p.v_scale != nullptr ? p.v_scale[kv_head * p.v_scale_step] : 1.f;
  const int64_t piece = 2 * static_cast<int64_t>(blockIdx.x) + (begun ? 1 : 0);
#pragma unroll
  for (int n = 0; n < RowTiles; ++n) {
    float top[2], sum[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float2* const column = sums + n * kRowTile + 2 * j + e;
      top[e] = column[0].x;
#pragma unroll
      for (int w = 1; w < kWarps; ++w) top[e] = fmaxf(top[e], column[w * S::kRows].x);
      sum[e] = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (column[w * S::kRows].x != -INFINITY) sum[e] += column[w * S::kRows].y * exp2_fast(column[w * S::kRows].x - top[e]);
      }
      const float factor = rows.top[n][e] == -INFINITY ? 0.f : exp2_fast(rows.top[n][e] - top[e]);
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) rows.o[n][d][e] *= factor, rows.o[n][d][e + 2] *= factor;
    }
#pragma unroll
    for (int d = 0; d < S::kBlocks; ++d) {
      exchange[(warp * S::kBlocks + d) * 32 + lane] = make_float4(rows.o[n][d][0], rows.o[n][d][1], rows.o[n][d][2], rows.o[n][d][3]);
    }
    __syncthreads();
    float o[S::kOwnBlocks][4];
#pragma unroll
    for (int i = 0; i < S::kOwnBlocks; ++i) {
      float4 t = exchange[(warp * S::kOwnBlocks + i) * 32 + lane];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const float4 x = exchange[(w * S::kBlocks + warp * S::kOwnBlocks + i) * 32 + lane];
        t.x += x.x, t.y += x.y, t.z += x.z, t.w += x.w;
      }
      o[i][0] = t.x, o[i][1] = t.y, o[i][2] = t.z, o[i][3] = t.w;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int index = n * kRowTile + 2 * j + e;
      const QueryRow row = query_row(p, at.unit, at.s.rows, index);
      if (!row.exists) continue;
      const float reference = top[e] == -INFINITY ? -INFINITY : top[e] - S::kLift;
      if (whole) {
        const RowEnd end = finish_row(reference, sum[e], p.sinks == nullptr ? nullptr : p.sinks + row.head);
        const int64_t line = static_cast<int64_t>(at.s.q_start + row.j) * p.heads + row.head;
        Q* const to = static_cast<Q*>(p.out) + line * Dim;
        const float factor = end.factor * v_scale;
#pragma unroll
        for (int i = 0; i < S::kOwnBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            to[R::dimension(warp * S::kOwnBlocks + i, e + 2 * half, lane)] = from_float<Q>(o[i][e + 2 * half] * factor);
          }
        }
        if (warp == 0 && lane < 4) p.lse[line] = end.lse;
      } else {
        float* const to = p.partial + (piece * S::kRows + index) * Dim;
#pragma unroll
        for (int i = 0; i < S::kOwnBlocks; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) to[R::dimension(warp * S::kOwnBlocks + i, e + 2 * half, lane)] = o[i][e + 2 * half];
        }
        if (warp == 0 && lane < 4) reinterpret_cast<float2*>(p.partial_sums)[piece * S::kRows + index] = make_float2(reference, sum[e]);
      }
    }
    __syncthreads();
  }
}

template <class Q, class Cache, int Dim, int RowTiles>
__global__ void __launch_bounds__(kWarps * 32, DecodeShape<Q, Cache, Dim, RowTiles>::kCtas)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams p) {
  using S = DecodeShape<Q, Cache, Dim, RowTiles>;
  extern __shared__ __align__(128) uint8_t decode_smem[];
  __shared__ LocateScratch<kWarps> scratch;
  float4* const exchange = reinterpret_cast<float4*>(decode_smem + S::kRing);
  float2* const sums = reinterpret_cast<float2*>(decode_smem + S::kRing + S::kExchange);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = shared_address(decode_smem) + warp * (S::kStages * 2 * S::kHalf);

  pdl_wait();
  // Each CTA passes the wait ahead of this, so the combine kernel may read kv_lens and q_starts without one of its own.
  pdl_trigger();
  const Place place = locate(p, scratch, [&](int total) { return Shares(p, total).begin(blockIdx.x); });
  const Shares shares(p, place.total);
  const int begin = shares.begin(blockIdx.x), left = shares.begin(blockIdx.x + 1) - begin;
  if (static_cast<int>(blockIdx.x) >= shares.workers || left == 0) return;
  Cursor at{sequence_at(p, place.b), place.b, 0, 0, left};
  at.unit = (begin - place.before) / at.s.tiles;
  at.tile = at.s.first + (begin - place.before) % at.s.tiles;

  Loader<S, Cache> loader{at, 0, 0, 0};
  loader.fetch_pages(p, warp, lane);
#pragma unroll 1
  for (int i = 0; i < S::kStages; ++i) {
    loader.issue(p, warp, lane, ring + i * (2 * S::kHalf));
    copy_commit();
  }

  int stage = 0;
#pragma unroll 1
  while (at.left > 0) {
    Rows<Q, Cache, Dim, RowTiles> rows;
    rows.begin(p, at, lane);
    const int begin_tile = at.tile, end_tile = at.end();
#pragma unroll 1
    for (; at.tile < end_tile; ++at.tile) {
      const uint32_t slot = ring + stage * (2 * S::kHalf);
      const int key = at.tile * kTileKeys + warp * kStepKeys;
      copy_wait<S::kStages - 1>();
      __syncwarp();
      if (key < at.s.length && key + kStepKeys > at.s.low) {
        float s[RowTiles][4];
        rows.scores(slot, lane, s);
        rows.weigh(p, key, lane, s);
        rows.add_values(slot + S::kHalf, lane, s);
      }
      __syncwarp();
      loader.issue(p, warp, lane, slot);
      copy_commit();
      if (++stage == S::kStages) stage = 0;
    }
    finish_segment(p, at, begin_tile, rows, exchange, sums, warp, lane);
    at.left -= end_tile - begin_tile;
    if (at.left > 0) at.next_segment(p);
  }
}

}  // namespace pyllm::attention
