// simple_attention: o = softmax(mask(variant(scale q k^T))) v by mma.sync and cp.async, for ragged prefill and paged decode alike; runs on
// sm_80 and later, and is the template that NVRTC compiles for variants (variant_attention.cuh).
//
// A CTA of 4 warps takes one tile of query rows of one KV head and, of its keys, one of `splits` runs of tiles. The G rows of a KV head's
// group stand side by side (row i is token i / G, head i % G), so that keys are read once for all of them.
//   many rows: 64 rows, a warp has 16 of them and sees all keys of a tile
//   few rows:  16 rows, a warp sees a quarter of the keys; the warps' sums are merged in shared memory at the end
// K and V each have one buffer: the next keys come while softmax and P V run, the next values while Q K^T runs. Row stride in shared
// memory: an odd number of 16-byte chunks, so that the 8 rows that ldmatrix reads fall into different banks.
// Keys outside [low, high) of the tile's rows are never read: zeros stand in for them (0 x NaN of an unused slot is NaN).
// Which tile a CTA has follows from q_starts alone, on the device; rows past q_starts[B] are one more sequence, without keys.
// e4m3 keys and values are widened to q's dtype on their way to shared memory; their scales go to the scores and to the result.
// Each row's sum runs over its keys in one order that depends on its sequence and `splits` alone. fp32 inside, weights rounded to 16 bits.
// Limits: D and Dv multiples of 8 (of 16 for e4m3 keys) up to 256; P a power of two.
#pragma once
#include "attention/simple_tile.cuh"
#include "common/pdl.cuh"

namespace pyllm::attention {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <class T, int Dim, int ValueDim, bool Few>
struct SimpleShape {
  static_assert(Dim % 8 == 0 && ValueDim % 8 == 0 && Dim <= 256 && ValueDim <= 256, "D and Dv are multiples of 8 up to 256");
  static constexpr int kWarps = kSimpleThreads / 32;
  static constexpr int kRows = Few ? 16 : 64;
  static constexpr int kKeys = Few || (Dim <= 128 && ValueDim <= 128) ? 64 : 32;  // of a tile
  static constexpr int kWarpKeys = Few ? kKeys / kWarps : kKeys;
  static constexpr int kSteps = (Dim + 15) / 16;        // of Q K^T
  static constexpr int kBlocks = (ValueDim + 15) / 16;  // of the result
  static constexpr int kRowBytes = (2 * kSteps | 1) * 16;
  static constexpr int kValueBytes = (2 * kBlocks | 1) * 16;
  static constexpr int kQ = kRows * kRowBytes, kK = kKeys * kRowBytes, kV = kKeys * kValueBytes;
  static constexpr int kMerge = Few ? kWarps * kRows * (ValueDim + 2) * 4 : 0;  // in place of K and V
  static constexpr int kSmem = kQ + (kK + kV > kMerge ? kK + kV : kMerge);
  static constexpr bool kHoldQ = Dim <= 128;  // in registers; else read again for each tile
};

// Where a score stands.
struct ScorePlace {
  int b, h;          // sequence, query head (of all ranks' heads)
  int q_pos, k_pos;  // positions in the sequence
  int q_len, kv_len;
  int token;  // row of q
};

struct PlainVariant {
  static constexpr bool kSameScore = true;  // score() changes nothing
  __device__ __forceinline__ explicit PlainVariant(const SimpleAttentionParams&) {}
  __device__ __forceinline__ float score(float s, const ScorePlace&) const { return s; }
  __device__ __forceinline__ bool mask(const ScorePlace&) const { return true; }
};

// What a warp knows of its 16 rows: rows r and r + 8 of lane 4 r + j.
template <class T, int Dim, int ValueDim, bool Few, class Variant>
struct SimpleRows {
  using S = SimpleShape<T, Dim, ValueDim, Few>;

  Variant variant;
  uint32_t q[S::kHoldQ ? S::kSteps : 1][4];
  float top[2], sum[2];  // maxima, and sums of 2^(x - top) over this lane's keys
  float o[2 * S::kBlocks][4];
  ScorePlace at[2];
  int last[2], first[2];        // keys that the row sees by length, causality and window: [first, last)
  const uint32_t* mask_row[2];  // null: no mask
  int mask_start;
  float scale;  // of the scores

  __device__ __forceinline__ explicit SimpleRows(const SimpleAttentionParams& p)
      : variant(p), scale(p.k_scale != nullptr ? p.scale * p.k_scale[blockIdx.y * p.k_scale_step] : p.scale) {}

  __device__ __forceinline__ void begin(const SimpleAttentionParams& p, const SimpleTile& tile, int row0, int lane) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = tile.first_row + row0 + lane / 4 + 8 * e;
      const bool exists = row / p.group < tile.n;
      const int j = exists ? row / p.group : tile.n - 1;  // a variant is never asked about a row that does not exist
      const int head = static_cast<int>(blockIdx.y) * p.group + row % p.group;
      at[e] = {tile.b, p.first_head + head, tile.L - tile.n + j, 0, tile.n, tile.L, tile.q_start + j};
      last[e] = !exists ? 0 : p.causal ? min(tile.L, at[e].q_pos + 1) : tile.L;
      first[e] = p.window > 0 ? at[e].q_pos - p.window + 1 : 0;
      mask_row[e] = p.mask != nullptr && exists && tile.b < p.batch ? p.mask + (tile.q_start + j) * p.mask_stride : nullptr;
      top[e] = -INFINITY;
      sum[e] = 0.f;
    }
    mask_start = p.mask_starts != nullptr && tile.b < p.batch ? p.mask_starts[tile.b] : tile.L - tile.n;
#pragma unroll
    for (int d = 0; d < 2 * S::kBlocks; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[d][e] = 0.f;
    }
  }

  static __device__ __forceinline__ void load_q(uint32_t (&a)[4], uint32_t q_tile, int step, int lane) {
    load_matrices(a, q_tile + (lane % 16) * S::kRowBytes + (2 * step + lane / 16) * 16);
  }
  __device__ __forceinline__ void hold_q(uint32_t q_tile, int lane) {
    if constexpr (S::kHoldQ) {
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) load_q(q[step], q_tile, step, lane);
    }
  }

  // s[i]: scores with keys 8 i .. 8 i + 7 of the warp's.
  __device__ __forceinline__ void scores(uint32_t q_tile, uint32_t keys, int lane, float (&s)[S::kWarpKeys / 8][4]) {
#pragma unroll
    for (int i = 0; i < S::kWarpKeys / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][e] = 0.f;
    }
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
      uint32_t fresh[4];
      if constexpr (!S::kHoldQ) load_q(fresh, q_tile, step, lane);
      const uint32_t (&a)[4] = S::kHoldQ ? q[S::kHoldQ ? step : 0] : fresh;
#pragma unroll
      for (int i = 0; i < S::kWarpKeys / 16; ++i) {
        uint32_t b[4];
        load_matrices(b, keys + (i * 16 + lane / 16 * 8 + lane % 8) * S::kRowBytes + (2 * step + lane / 8 % 2) * 16);
        mma<T>(s[2 * i], a, {b[0], b[1]});
        mma<T>(s[2 * i + 1], a, {b[2], b[3]});
      }
    }
  }

  // Whether the row sees the key; a variant is asked only about keys inside length, causality and window.
  __device__ __forceinline__ bool allowed(const SimpleAttentionParams& p, int e, const ScorePlace& place) const {
    if (place.k_pos < first[e] || place.k_pos >= last[e]) return false;
    const int bit = place.k_pos - mask_start;
    if (mask_row[e] != nullptr && bit >= 0 && bit < p.mask_words * 32 && (mask_row[e][bit / 32] >> (bit % 32) & 1) == 0) return false;
    return variant.mask(place);
  }
  // In powers of two. Plain: no softcap.
  template <bool Plain>
  __device__ __forceinline__ float exponent(const SimpleAttentionParams& p, float product, const ScorePlace& place) const {
    if constexpr (Plain && Variant::kSameScore) return product * (scale * kLog2e);
    const float x = variant.score(product * scale, place);
    if (Plain || p.softcap == 0.f) return x * kLog2e;
    // tanh(x) = 1 - 2 / (e^2x + 1): absolute error 2^-22, where tanh.approx has 2^-11, a 2.4 % error of exp at a cap of 50.
    const float cap = p.softcap * kLog2e;
    return cap - 2.f * cap * reciprocal_fast(exp2_fast(x / p.softcap * (2.f * kLog2e)) + 1.f);
  }

  // Scores to weights 2^(x - top), in place; earlier sums and results move to the new maxima. Plain: all rows see all keys, and there is no
  // softcap, so that only the variant is asked.
  template <bool Plain>
  __device__ __forceinline__ void weigh(const SimpleAttentionParams& p, int first_key, int lane, float (&s)[S::kWarpKeys / 8][4]) {
    float now[2] = {top[0], top[1]};
#pragma unroll
    for (int i = 0; i < S::kWarpKeys / 8; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ScorePlace& place = at[e / 2];
        place.k_pos = first_key + i * 8 + lane % 4 * 2 + e % 2;
        const bool seen = Plain ? variant.mask(place) : allowed(p, e / 2, place);
        s[i][e] = seen ? exponent<Plain>(p, s[i][e], place) : -INFINITY;
        now[e / 2] = fmaxf(now[e / 2], s[i][e]);
      }
    }
    bool moved = false;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) now[e] = fmaxf(now[e], __shfl_xor_sync(0xffffffffu, now[e], offset));
      moved |= now[e] > top[e];
    }
    if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float factor = now[e] > top[e] ? exp2_fast(top[e] - now[e]) : 1.f;
        top[e] = now[e];
        sum[e] *= factor;
#pragma unroll
        for (int d = 0; d < 2 * S::kBlocks; ++d) {
          o[d][2 * e] *= factor;
          o[d][2 * e + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float reference = top[e] == -INFINITY ? 0.f : top[e];
#pragma unroll
      for (int i = 0; i < S::kWarpKeys / 8; ++i) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          s[i][2 * e + c] = exp2_fast(s[i][2 * e + c] - reference);
          sum[e] += s[i][2 * e + c];
        }
      }
    }
  }

  __device__ __forceinline__ void add_values(uint32_t values, int lane, const float (&s)[S::kWarpKeys / 8][4]) {
#pragma unroll
    for (int i = 0; i < S::kWarpKeys / 16; ++i) {
      const uint32_t a[4] = {pack_two(s[2 * i][0], s[2 * i][1], T{}), pack_two(s[2 * i][2], s[2 * i][3], T{}),
                             pack_two(s[2 * i + 1][0], s[2 * i + 1][1], T{}), pack_two(s[2 * i + 1][2], s[2 * i + 1][3], T{})};
#pragma unroll
      for (int d = 0; d < S::kBlocks; ++d) {
        uint32_t b[4];
        load_matrices_transposed(b, values + (i * 16 + lane % 16) * S::kValueBytes + (2 * d + lane / 16) * 16);
        mma<T>(o[2 * d], a, {b[0], b[1]});
        mma<T>(o[2 * d + 1], a, {b[2], b[3]});
      }
    }
  }

  __device__ __forceinline__ void join_lanes() {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], offset);
    }
  }
};

// Where row `row` of a tile's group goes, and what its values are multiplied by once its sum is known.
struct SimpleRowEnd {
  int64_t place;  // token * H + head; negative: no such row
  float factor, lse;

  __device__ __forceinline__ SimpleRowEnd(const SimpleAttentionParams& p, const SimpleTile& tile, int row, float top, float sum) {
    const int j = (tile.first_row + row) / p.group, head = blockIdx.y * p.group + tile.first_row + row - j * p.group;
    place = j < tile.n ? (static_cast<int64_t>(tile.q_start) + j) * p.heads + head : -1;
    factor = sum == 0.f ? 0.f : 1.f / sum;  // NaN stays NaN
    lse = sum == 0.f ? -INFINITY : (top + log2f(sum)) * kLn2;
    if (p.v_scale != nullptr) factor *= p.v_scale[blockIdx.y * p.v_scale_step];
    if (p.splits == 1 && p.sinks != nullptr && tile.b < p.batch && place >= 0) add_sink(p.sinks[head]);
  }
  // exp(sink) joins the denominator.
  __device__ __forceinline__ void add_sink(float sink) {
    const float high = fmaxf(lse, sink);
    if (high == -INFINITY) return;
    const float with = high + log2f(exp2f((lse - high) * kLog2e) + exp2f((sink - high) * kLog2e)) * kLn2;
    factor *= exp2f((lse - with) * kLog2e);
    lse = with;
  }
};

// Two neighbouring values of a row.
template <class T, int ValueDim>
__device__ __forceinline__ void store_two(const SimpleAttentionParams& p, int64_t place, int d, float lo, float hi) {
  if (p.splits > 1) {
    const int64_t row = blockIdx.z * p.tokens * p.heads + place;
    *reinterpret_cast<float2*>(p.partial + row * ValueDim + d) = {lo, hi};
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + place * ValueDim + d) = pack_two(lo, hi, T{});
  }
}
__device__ __forceinline__ void store_lse(const SimpleAttentionParams& p, int64_t place, float lse) {
  (p.splits > 1 ? p.partial_lse + blockIdx.z * p.tokens * p.heads : p.lse)[place] = lse;
}

// Many rows: each warp stores its own.
template <class T, int ValueDim, class Rows>
__device__ __forceinline__ void store_rows(const SimpleAttentionParams& p, const SimpleTile& tile, int row0, int lane, const Rows& rows) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const SimpleRowEnd end(p, tile, row0 + lane / 4 + 8 * e, rows.top[e], rows.sum[e]);
    if (end.place < 0) continue;
#pragma unroll
    for (int d = 0; d < ValueDim / 8; ++d) {
      store_two<T, ValueDim>(p, end.place, d * 8 + lane % 4 * 2, rows.o[d][2 * e] * end.factor, rows.o[d][2 * e + 1] * end.factor);
    }
    if (lane % 4 == 0) store_lse(p, end.place, end.lse);
  }
}

// Few rows: the warps' results over their keys meet in shared memory, [warp][row][top, sum, Dv values]. By all threads.
template <class T, int ValueDim, class Rows>
__device__ __forceinline__ void merge_rows(const SimpleAttentionParams& p, const SimpleTile& tile, int warp, int lane, const Rows& rows,
                                           float* shared) {
  constexpr int kWarps = kSimpleThreads / 32, kStride = ValueDim + 2;
  __syncthreads();  // K and V are read
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float* row = shared + (warp * 16 + lane / 4 + 8 * e) * kStride;
    if (lane % 4 == 0) {
      row[0] = rows.top[e];
      row[1] = rows.sum[e];
    }
#pragma unroll
    for (int d = 0; d < ValueDim / 8; ++d) {
      *reinterpret_cast<float2*>(row + 2 + d * 8 + lane % 4 * 2) = {rows.o[d][2 * e], rows.o[d][2 * e + 1]};
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * (ValueDim / 2); i += kSimpleThreads) {
    const int row = i / (ValueDim / 2), d = i % (ValueDim / 2) * 2;
    float top = -INFINITY, sum = 0.f, lo = 0.f, hi = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, shared[(w * 16 + row) * kStride]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float* from = shared + (w * 16 + row) * kStride;
      const float factor = from[0] == -INFINITY ? 0.f : exp2f(from[0] - top);
      sum += from[1] * factor;
      lo += from[2 + d] * factor;
      hi += from[3 + d] * factor;
    }
    const SimpleRowEnd end(p, tile, row, top, sum);
    if (end.place < 0) continue;
    store_two<T, ValueDim>(p, end.place, d, lo * end.factor, hi * end.factor);
    if (d == 0) store_lse(p, end.place, end.lse);
  }
}

template <class T, bool Fp8, int Dim, int ValueDim, bool Few, class Variant>
__device__ __forceinline__ void simple_attention(const SimpleAttentionParams& p) {
  using S = SimpleShape<T, Dim, ValueDim, Few>;
  extern __shared__ __align__(16) char shared[];
  __shared__ int scratch[6];
  __shared__ KeyPlaces<S::kKeys, Fp8> places;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t q_tile = shared_address(shared), keys = q_tile + S::kQ, values = keys + S::kK;
  pdl_wait();
  SimpleTile tile;
  if (!tile.find(p, S::kRows, scratch)) return;
  tile.keys(p, S::kRows, S::kKeys);

  const int64_t first = places.look_up(p, tile, tile.begin);
  const int rows_left = tile.n * p.group - tile.first_row;
  copy_rows<S::kRows, 2 * S::kSteps, Dim / 8>(
      q_tile, static_cast<const char*>(p.q),
      [&](int row) {
        const int i = tile.first_row + min(row, rows_left - 1), j = i / p.group, head = blockIdx.y * p.group + i - j * p.group;
        return ((static_cast<int64_t>(tile.q_start) + j) * p.q_token_stride + head * p.q_head_stride) * 2;
      },
      [&](int row) { return row < rows_left; });
  const char* k_base = static_cast<const char*>(p.k) + blockIdx.y * p.k_head_stride * (Fp8 ? 1 : 2);
  const char* v_base = static_cast<const char*>(p.v) + blockIdx.y * p.v_head_stride * (Fp8 ? 1 : 2);
  const auto copy_k = [&](int key, int which) {
    if (key < tile.end) copy_keys<T, Fp8, S::kKeys, Dim>(tile, key, keys, k_base, places.offsets[which][0]);
    copy_commit();
  };
  const auto copy_v = [&](int key, int which) {
    if (key < tile.end) copy_keys<T, Fp8, S::kKeys, ValueDim>(tile, key, values, v_base, places.offsets[which][1]);
    copy_commit();
  };
  places.put(0, first);
  __syncthreads();
  copy_k(tile.begin, 0);
  copy_v(tile.begin, 0);
  const int row0 = Few ? 0 : warp * 16, key0 = Few ? warp * S::kWarpKeys : 0;
  SimpleRows<T, Dim, ValueDim, Few, Variant> rows(p);
  rows.begin(p, tile, row0, lane);
  const bool plain = p.mask == nullptr && p.softcap == 0.f;
  for (int key = tile.begin, next = 1; key < tile.end; key += S::kKeys, next ^= 1) {
    float s[S::kWarpKeys / 8][4];
    const int64_t ahead = places.look_up(p, tile, key + S::kKeys);
    copy_wait<1>();
    __syncthreads();
    if (key == tile.begin) rows.hold_q(q_tile + row0 * S::kRowBytes, lane);
    rows.scores(q_tile + row0 * S::kRowBytes, keys + key0 * S::kRowBytes, lane, s);
    places.put(next, ahead);
    __syncthreads();
    copy_k(key + S::kKeys, next);
    if (plain && key >= tile.all_low && key + S::kKeys <= tile.all_high) {
      rows.template weigh<true>(p, key + key0, lane, s);
    } else {
      rows.template weigh<false>(p, key + key0, lane, s);
    }
    copy_wait<1>();
    __syncthreads();
    rows.add_values(values + key0 * S::kValueBytes, lane, s);
    __syncthreads();
    copy_v(key + S::kKeys, next);
  }
  pdl_trigger();
  copy_wait<0>();
  rows.join_lanes();
  if constexpr (Few) {
    merge_rows<T, ValueDim>(p, tile, warp, lane, rows, reinterpret_cast<float*>(shared + S::kQ));
  } else {
    store_rows<T, ValueDim>(p, tile, row0, lane, rows);
  }
}

// One CTA per (token, head): joins the splits, in order.
template <class T, int ValueDim>
__device__ __forceinline__ void simple_combine(const SimpleAttentionParams& p) {
  const int64_t rows = p.tokens * p.heads, place = blockIdx.x;
  const int head = static_cast<int>(place % p.heads);
  pdl_wait();
  pdl_trigger();
  float top = -INFINITY, sum = 0.f;
  for (int i = 0; i < p.splits; ++i) top = fmaxf(top, p.partial_lse[i * rows + place]);
  // Rows past the last sequence have no sink.
  const bool sink = p.sinks != nullptr && place / p.heads < p.q_starts[p.batch];
  if (sink) top = fmaxf(top, p.sinks[head]);
  if (top > -INFINITY) {
    for (int i = 0; i < p.splits; ++i) sum += exp2f((p.partial_lse[i * rows + place] - top) * kLog2e);
    if (sink) sum += exp2f((p.sinks[head] - top) * kLog2e);
  }
  const float lse = top > -INFINITY ? top + log2f(sum) * kLn2 : -INFINITY;
  for (int d = threadIdx.x * 2; d < ValueDim; d += blockDim.x * 2) {
    float lo = 0.f, hi = 0.f;
    for (int i = 0; i < p.splits; ++i) {
      const float one = p.partial_lse[i * rows + place];
      if (one == -INFINITY) continue;
      const float factor = exp2f((one - lse) * kLog2e);
      const float2 two = *reinterpret_cast<const float2*>(p.partial + (i * rows + place) * ValueDim + d);
      lo += two.x * factor;
      hi += two.y * factor;
    }
    *reinterpret_cast<uint32_t*>(static_cast<T*>(p.out) + place * ValueDim + d) = pack_two(lo, hi, T{});
  }
  if (threadIdx.x == 0) p.lse[place] = lse;
}

template <class T, bool Fp8, int Dim, bool Few>
__global__ void __launch_bounds__(kSimpleThreads) simple_attention_kernel(const __grid_constant__ SimpleAttentionParams p) {
  simple_attention<T, Fp8, Dim, Dim, Few, PlainVariant>(p);
}
template <class T, int ValueDim>
__global__ void __launch_bounds__(kSimpleThreads) simple_combine_kernel(const __grid_constant__ SimpleAttentionParams p) {
  simple_combine<T, ValueDim>(p);
}

}  // namespace pyllm::attention
