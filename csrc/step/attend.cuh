// Attention of a decode step: each CTA takes some keys of one sequence for one KV head, at most one such piece where there are enough CTAs.
//
// It reads the heads of qkv that it needs from the exchange, norms and turns them itself, and the CTA with the newest key stores key and
// value in the cache; the others never need them from there. Keys are the 8-column side of mma m16n8k16, the query heads of the group the
// 16-row side, permuted within 32 (e4m3: 64) dimensions, so that 16 bytes of a lane are operands as they are; values of two keys make an
// operand by byte permutation. Everything goes from the cache straight to registers, the next 16 keys of a warp while these are used.
//
// The CTAs of a head exchange their results and each joins a slice of the outputs.
// Limits: 8 query heads to a KV head, D 64 or 128, pages of a multiple of 16 keys.
#pragma once
#include "fused/activations.cuh"
#include "step/product.cuh"

namespace pyllm::step {

constexpr int kKeys = 16;  // that a warp takes at a time
constexpr int kGroup = 8;  // query heads of a KV head, at most

__device__ __forceinline__ uint4 load_16(const uint8_t* p) { return __ldcs(reinterpret_cast<const uint4*>(p)); }

template <int D, bool Byte>
struct AttendShape {
  static constexpr int kRow = D * (Byte ? 1 : 2);  // bytes of a key
  static constexpr int kQPitch = D * 2 + 16;
  static constexpr int kQ = 0, kNew = kGroup * kQPitch;  // the new key and value
  static constexpr int kMerge = kNew + 2 * kRow;         // partial results of the warps; before that the heads in fp32
  static constexpr int kFloats = D + 2;                  // of a head: results, maximum, sum
  __host__ __device__ static constexpr int bytes(int group) {
    const int merge = kWarps * group * kFloats * 4, heads = (kGroup + 2) * D * 4;
    return kMerge + (merge > heads ? merge : heads);
  }
};

template <int D, bool Byte>
struct Attend {
  using Shape = AttendShape<D, Byte>;
  static constexpr int kRow = Shape::kRow;
  static constexpr int kKeyLoads = kRow / 64;                          // 16-byte loads of a lane for eight keys
  static constexpr int kValueLoads = kRow / 128 > 0 ? kRow / 128 : 1;  // for one key
  static constexpr int kValueDims = D / 8;                             // of a key's values that a lane holds

  const Args& a;
  const StepLayer* const table;
  int lane, warp, group, quad;
  uint32_t shared;                 // the area of x
  int known = -1;                  // the piece that the following are of
  int m, head, split, heads;       // row, KV head, its piece, query heads of the KV head
  int length, begin, end, splits;  // keys; steps of kKeys of this piece; pieces that have any
  int slot, last;                  // of the new key; its index, where that place is its own, else -1
  int64_t first;                   // where the warp's first step lies in a cache
  float cosine[D / 32], sine[D / 32];
  const uint8_t *keys, *values;  // of the KV head in the layer's caches

  uint4 k[2][kKeyLoads];
  uint4 v[4][kValueLoads];
  float out[kValueDims][4];
  float most, sum;

  __device__ __forceinline__ Attend(const Args& args, const StepLayer* layers, uint32_t area) : a(args), table(layers), shared(area) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    heads = a.p.heads / a.p.kv_heads;
  }

  // --- which keys, and where they are ---

  // The same in all layers, so it stays in registers: there is little L1 beside the ring, and an L2 miss waits behind the weights.
  __device__ __forceinline__ void find(int task) {
    if (task == known) return;
    known = task;
    split = task % a.splits, head = task / a.splits % a.p.kv_heads, m = task / a.splits / a.p.kv_heads;
    length = max(0, __ldg(a.p.kv_lens + m)), slot = __ldg(a.p.slots + m);
    const int steps = (length + kKeys - 1) / kKeys, each = max(1, (steps + a.splits - 1) / a.splits);
    splits = (steps + each - 1) / each;
    begin = min(steps, split * each), end = min(steps, begin + each);
    last = length > 0 && slot == slot_of(length - 1) ? length - 1 : -1;
    first = begin + warp < end ? place_of(slot_of((begin + warp) * kKeys)) : 0;
    const float* const line = a.p.cos_sin + static_cast<int64_t>(__ldg(a.p.rope_rows + m)) * a.p.rotary;
    const int half = a.p.rotary / 2;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const int d = dimension(i), pair = d < half ? d : d - half;
      cosine[i] = d < a.p.rotary ? __ldg(line + pair) : 1.f, sine[i] = d < a.p.rotary ? __ldg(line + half + pair) : 0.f;
    }
  }
  // This piece stores the new key: it has the newest place, or is the first where there are no keys.
  __device__ __forceinline__ bool stores() const { return split == max(0, splits - 1); }

  __device__ __forceinline__ int slot_of(int key) const {
    return __ldg(a.p.page_table + static_cast<int64_t>(m) * a.p.table_stride + key / a.p.page) * a.p.page + key % a.p.page;
  }
  // Bytes from the first key of a head to the one in `slot`.
  __device__ __forceinline__ int64_t place_of(int slot) const {
    const int64_t element =
        static_cast<int64_t>(slot / a.p.page) * a.p.page_stride + static_cast<int64_t>(slot % a.p.page) * a.p.kv_heads * D;
    return element * (Byte ? 1 : 2);
  }
  __device__ __forceinline__ bool reads(int key) const { return key < length && key != last; }

  __device__ __forceinline__ void load_keys(int step, int64_t at) {
    const int64_t pitch = static_cast<int64_t>(a.p.kv_heads) * kRow;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint8_t* const p = keys + at + (8 * j + group) * pitch + quad * 16;
#pragma unroll
      for (int i = 0; i < kKeyLoads; ++i) {
        k[j][i] = {};
        if (reads(step * kKeys + 8 * j + group)) k[j][i] = load_16(p + i * 64);
      }
    }
  }
  // The key of this lane's j-th pair of values, and where its part of them begins.
  __device__ __forceinline__ int value_key(int j) const { return 2 * quad + (j & 1) + (j & 2) * 4; }
  __device__ __forceinline__ void load_values(int step, int64_t at) {
    const int64_t pitch = static_cast<int64_t>(a.p.kv_heads) * kRow;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint8_t* const p = values + at + value_key(j) * pitch;
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        v[j][i] = {};
        if (!reads(step * kKeys + value_key(j))) continue;
        if constexpr (kRow < 128) {
          const uint2 half = __ldcs(reinterpret_cast<const uint2*>(p + group * 8));
          v[j][i] = {half.x, half.y, 0, 0};
        } else {
          v[j][i] = load_16(p + i * 128 + group * 16);
        }
      }
    }
  }
  // The new key and value take their places from shared memory.
  __device__ __forceinline__ void patch_keys(int step) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (step * kKeys + 8 * j + group != last) continue;
#pragma unroll
      for (int i = 0; i < kKeyLoads; ++i) k[j][i] = load_shared_16(shared + Shape::kNew + i * 64 + quad * 16);
    }
  }
  __device__ __forceinline__ void patch_values(int step) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (step * kKeys + value_key(j) != last) continue;
      const uint32_t from = shared + Shape::kNew + kRow;
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        if constexpr (kRow < 128) {
          const float2 half = load_shared_pair(from + group * 8);
          v[j][i] = {__float_as_uint(half.x), __float_as_uint(half.y), 0, 0};
        } else {
          v[j][i] = load_shared_16(from + i * 128 + group * 16);
        }
      }
    }
  }

  // --- the heads of qkv ---

  // One warp: head `index` of those of this KV head (queries, key, value) through its norm and rotation to shared memory and the cache.
  __device__ __forceinline__ void take_head(const uint8_t* qkv, int layer, int index) const {
    constexpr int kOwn = D / 64;  // pairs of values of a lane
    const StepLayer& w = table[layer];
    const bool is_q = index < heads, is_k = index == heads;
    const int row = is_q ? head * heads + index : a.p.heads + head + (is_k ? 0 : a.p.kv_heads);
    const uint32_t scratch = shared + Shape::kMerge + index * D * 4;
    const int half = a.p.rotary / 2;
    float y[2 * kOwn];
    float square = 0.f;
    uint32_t word[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) word[i] = load_relaxed(qkv + row * (D * 2) + (lane + 32 * i) * 4);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      while (word[i] == 0) word[i] = load_relaxed(qkv + row * (D * 2) + (lane + 32 * i) * 4);
      const float2 two = from_bf16_pair(~word[i]);
      y[2 * i] = two.x, y[2 * i + 1] = two.y;
      square += two.x * two.x + two.y * two.y;
    }
    const float* const norm = is_q ? w.q_norm : is_k ? w.k_norm : nullptr;
    if (norm != nullptr) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) square += __shfl_xor_sync(0xffffffffu, square, offset);
      const float factor = rsqrtf(square * (1.f / D) + a.p.eps);
#pragma unroll
      for (int i = 0; i < 2 * kOwn; ++i) y[i] *= factor * __ldg(norm + dimension(i));
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) store_shared_pair(scratch + (lane + 32 * i) * 8, y[2 * i], y[2 * i + 1]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) {
      const int d = dimension(i);
      if (d >= a.p.rotary || !(is_q || is_k)) continue;
      const float other = load_shared_float(scratch + (d < half ? d + half : d - half) * 4);
      y[i] = d < half ? y[i] * cosine[i] - other * sine[i] : y[i] * cosine[i] + other * sine[i];
    }
    if (is_q) return keep_query(index, y);
    keep_new(layer, is_k, y);
  }
  __device__ __forceinline__ int dimension(int i) const { return 2 * (lane + 32 * (i / 2)) + i % 2; }

  __device__ __forceinline__ void keep_query(int index, const float* y) const {
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {
      uint32_t word = bf16_pair(y[2 * i], y[2 * i + 1]);
      if constexpr (Byte) {
        const float2 two = from_bf16_pair(word);
        const __half2 halves = __floats2half2_rn(two.x, two.y);
        word = reinterpret_cast<const uint32_t&>(halves);
      }
      store_shared_word(shared + Shape::kQ + index * Shape::kQPitch + (lane + 32 * i) * 4, word);
    }
  }

  __device__ __forceinline__ void keep_new(int layer, bool is_k, const float* y) const {
    const StepLayer& w = table[layer];
    uint8_t* const cache = static_cast<uint8_t*>(is_k ? w.k_cache : w.v_cache) + head * kRow + place_of(max(slot, 0));
    const uint32_t here = shared + Shape::kNew + (is_k ? 0 : kRow);
    const bool store = slot >= 0 && stores();
    float inverse = 1.f;
    if constexpr (Byte) inverse = 1.f / (is_k ? cache_scale(w.k_scale, a.p.k_scale_step) : cache_scale(w.v_scale, a.p.v_scale_step));
#pragma unroll
    for (int i = 0; i < D / 64; ++i) {
      const int word = lane + 32 * i;
      if constexpr (Byte) {
        const uint16_t two = to_e4m3x2(y[2 * i] * inverse, y[2 * i + 1] * inverse);
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(here + word * 2), "h"(two) : "memory");
        if (store) *reinterpret_cast<uint16_t*>(cache + word * 2) = two;
      } else {
        const uint32_t two = bf16_pair(y[2 * i], y[2 * i + 1]);
        store_shared_word(here + word * 4, two);
        if (store) *reinterpret_cast<uint32_t*>(cache + word * 4) = two;
      }
    }
  }
  __device__ __forceinline__ float cache_scale(const float* scale, int step) const {
    return scale == nullptr ? 1.f : __ldg(scale + head * step);
  }

  // --- products ---

  // A lane's part of a query head: the first operands of its keys.
  struct Query {
    uint4 q[D / 32];
  };
  __device__ __forceinline__ Query query() const {
    Query query;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const int at = Byte ? i / 2 * 128 + quad * 32 + i % 2 * 16 : i * 64 + quad * 16;
      query.q[i] = group < heads ? load_shared_16(shared + Shape::kQ + group * Shape::kQPitch + at) : uint4{};
    }
    return query;
  }

  __device__ __forceinline__ void score(float (&s)[4], const Query& query, const uint4 (&key)[kKeyLoads]) const {
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
      if constexpr (Byte) {
        const uint4 lo = query.q[2 * i], hi = query.q[2 * i + 1];
        multiply<__half>(s, lo.x, lo.y, widen_e4m3(key[i].x), widen_e4m3(key[i].x >> 16));
        multiply<__half>(s, lo.z, lo.w, widen_e4m3(key[i].y), widen_e4m3(key[i].y >> 16));
        multiply<__half>(s, hi.x, hi.y, widen_e4m3(key[i].z), widen_e4m3(key[i].z >> 16));
        multiply<__half>(s, hi.z, hi.w, widen_e4m3(key[i].w), widen_e4m3(key[i].w >> 16));
      } else {
        multiply<__nv_bfloat16>(s, query.q[i].x, query.q[i].y, key[i].x, key[i].y);
        multiply<__nv_bfloat16>(s, query.q[i].z, query.q[i].w, key[i].z, key[i].w);
      }
    }
  }

  static __device__ __forceinline__ uint32_t word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

  // out += p v: dimension `i` of this lane's, of its four keys, is column `group` of the i-th tile.
  __device__ __forceinline__ void add_values(uint32_t p0, uint32_t p1) {
#pragma unroll
    for (int l = 0; l < kValueLoads; ++l) {
      constexpr int kWords = kRow < 128 ? 2 : 4;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t w0 = word_of(v[0][l], i), w1 = word_of(v[1][l], i), w2 = word_of(v[2][l], i), w3 = word_of(v[3][l], i);
        if constexpr (Byte) {
          const uint32_t lo = __byte_perm(w0, w1, 0x5140), hi = __byte_perm(w0, w1, 0x7362);
          const uint32_t lo2 = __byte_perm(w2, w3, 0x5140), hi2 = __byte_perm(w2, w3, 0x7362);
          const int tile = i * 4;
          multiply<__half>(out[tile], p0, p1, widen_e4m3(lo), widen_e4m3(lo2));
          multiply<__half>(out[tile + 1], p0, p1, widen_e4m3(lo >> 16), widen_e4m3(lo2 >> 16));
          multiply<__half>(out[tile + 2], p0, p1, widen_e4m3(hi), widen_e4m3(hi2));
          multiply<__half>(out[tile + 3], p0, p1, widen_e4m3(hi >> 16), widen_e4m3(hi2 >> 16));
        } else {
          const int tile = l * 8 + i * 2;
          multiply<__nv_bfloat16>(out[tile], p0, p1, __byte_perm(w0, w1, 0x5410), __byte_perm(w2, w3, 0x5410));
          multiply<__nv_bfloat16>(out[tile + 1], p0, p1, __byte_perm(w0, w1, 0x7632), __byte_perm(w2, w3, 0x7632));
        }
      }
    }
  }
  // The dimension that column n of tile `i` stands for.
  static __device__ __forceinline__ int dim_of(int i, int n) {
    if constexpr (Byte) return n * kValueDims + i;
    return i / 8 * 64 + n * 8 + i % 8;
  }

  static __device__ __forceinline__ uint32_t pack_p(float x, float y) {
    if constexpr (!Byte) return bf16_pair(x, y);
    const __half2 two = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(two);
  }

  // The steps of this warp; the loads of the first are on their way.
  __device__ __forceinline__ void run_steps(float scale) {
    most = -INFINITY, sum = 0.f;
#pragma unroll
    for (int i = 0; i < kValueDims; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.f;
    const Query q = query();
    for (int step = begin + warp; step < end; step += kWarps) {
      const bool has_new = last >= 0 && step == last / kKeys, more = step + kWarps < end;
      const int64_t next = more ? place_of(slot_of((step + kWarps) * kKeys)) : 0;
      if (has_new) patch_keys(step);
      float s[2][4] = {};
      score(s[0], q, k[0]);
      score(s[1], q, k[1]);
      if (more) load_keys(step + kWarps, next);
      float highest = most;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          s[j][i] = step * kKeys + 8 * j + 2 * quad + i < length ? s[j][i] * scale : -INFINITY;
          highest = fmaxf(highest, s[j][i]);
        }
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float shrink = fused::fast_exp2(most - highest);
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) p[i] = fused::fast_exp2(s[i / 2][i % 2] - highest);
      most = highest, sum = sum * shrink + (p[0] + p[1]) + (p[2] + p[3]);
#pragma unroll
      for (int i = 0; i < kValueDims; ++i) out[i][0] *= shrink, out[i][1] *= shrink;
      if (has_new) patch_values(step);
      add_values(pack_p(p[0], p[1]), pack_p(p[2], p[3]));
      if (more) load_values(step + kWarps, next);
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  }

  // --- joins ---

  __device__ __forceinline__ uint32_t part_of(int w, int h) const { return shared + Shape::kMerge + (w * heads + h) * Shape::kFloats * 4; }

  __device__ __forceinline__ void share_warp() const {
    if (begin + warp >= end || group >= heads) return;
    const uint32_t to = part_of(warp, group);
#pragma unroll
    for (int i = 0; i < kValueDims; ++i) {
      store_shared_float(to + dim_of(i, 2 * quad) * 4, out[i][0]);
      store_shared_float(to + dim_of(i, 2 * quad + 1) * 4, out[i][1]);
    }
    if (quad == 0) store_shared_pair(to + D * 4, most, sum);
  }

  // All threads: the warps' results become one, which goes to the other CTAs of the head.
  __device__ __forceinline__ void send(uint64_t* partials, uint32_t stamp) const {
    const int warps = min(kWarps, end - begin);
    if (warps <= 0) return;
    for (int i = threadIdx.x; i < heads * (D / 2); i += kConsumers) {
      const int h = i / (D / 2), d = i % (D / 2) * 2;
      float2 state[kWarps], one[kWarps];
      float highest = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        state[w] = {-INFINITY, 0.f}, one[w] = {};
        if (w < warps) state[w] = load_shared_pair(part_of(w, h) + D * 4), one[w] = load_shared_pair(part_of(w, h) + d * 4);
        highest = fmaxf(highest, state[w].x);
      }
      float total = 0.f;
      float2 y{};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float factor = fused::fast_exp2(state[w].x - highest);
        total = fmaf(state[w].y, factor, total), y.x = fmaf(one[w].x, factor, y.x), y.y = fmaf(one[w].y, factor, y.y);
      }
      uint64_t* const to = partials + h * Shape::kFloats;
      store_packets(to + d, y.x, y.y, stamp);
      if (d == 0) store_packets(to + D, highest, total, stamp);
    }
  }

  // This CTA's slice of the outputs of the group: 16 lanes to a pair of values, one to each piece (and the one 16 behind it).
  __device__ __forceinline__ void join(const uint64_t* group_partials, uint8_t* to, float scale, uint32_t stamp) const {
    const int pairs = heads * (D / 2), first = pairs * split / a.splits, past = pairs * (split + 1) / a.splits;
    const int piece = lane % 16;
    for (int i = first + warp * 2; i < past; i += kWarps * 2) {
      const int pair = i + lane / 16, h = min(pair, pairs - 1) / (D / 2), d = pair % (D / 2) * 2;
      const bool exists = pair < past;
      float most_of[2] = {-INFINITY, -INFINITY}, sum_of[2] = {};
      float2 y[2] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int source = piece + 16 * r;
        if (!exists || source >= splits) continue;
        const uint64_t* const from = group_partials + (static_cast<int64_t>(source) * heads + h) * Shape::kFloats;
        Packets state = load_packets(from + D), one = load_packets(from + d);
        while (!stamped(state, stamp) || !stamped(one, stamp)) state = load_packets(from + D), one = load_packets(from + d);
        most_of[r] = values_of(state).x, sum_of[r] = values_of(state).y, y[r] = values_of(one);
      }
      float highest = fmaxf(most_of[0], most_of[1]);
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, offset));
      float total = 0.f;
      float2 result{};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = most_of[r] == -INFINITY ? 0.f : fused::fast_exp2(most_of[r] - highest);
        total = fmaf(sum_of[r], factor, total), result.x = fmaf(y[r].x, factor, result.x), result.y = fmaf(y[r].y, factor, result.y);
      }
#pragma unroll
      for (int offset = 8; offset > 0; offset /= 2) {
        total += __shfl_xor_sync(0xffffffffu, total, offset);
        result.x += __shfl_xor_sync(0xffffffffu, result.x, offset);
        result.y += __shfl_xor_sync(0xffffffffu, result.y, offset);
      }
      const float factor = total == 0.f ? 0.f : scale * fused::fast_reciprocal(total);  // 0: no keys
      if (exists && piece == 0) publish(to + (static_cast<int64_t>(head * heads + h) * D + d) * 2, result.x * factor, result.y * factor);
    }
  }
  static __device__ __forceinline__ float2 values_of(const Packets& p) { return step::values(p); }

  // qkv and attended: the rows of the layer in the exchange, `stride` bytes apart; partials: of all pieces.
  __device__ __forceinline__ void run(int layer, uint8_t* qkv, uint8_t* attended, int64_t stride, uint64_t* partials, uint32_t stamp) {
    const int tasks = a.p.rows * a.p.kv_heads * a.splits;
    for (int task = blockIdx.x; task < tasks; task += gridDim.x) {
      find(task);
      const StepLayer& w = table[layer];
      keys = static_cast<const uint8_t*>(w.k_cache) + head * kRow, values = static_cast<const uint8_t*>(w.v_cache) + head * kRow;
      if (begin + warp < end) load_keys(begin + warp, first), load_values(begin + warp, first);
      named_sync(1, kConsumers);  // x, whose place this is, has been read
      for (int index = warp; index < heads + 2; index += kWarps) take_head(qkv + m * stride, layer, index);
      named_sync(1, kConsumers);
      const float k_scale = Byte ? cache_scale(w.k_scale, a.p.k_scale_step) : 1.f;
      const float v_scale = Byte ? cache_scale(w.v_scale, a.p.v_scale_step) : 1.f;
      if (begin + warp < end) run_steps(a.p.softmax_scale * k_scale * fused::kLog2E);
      share_warp();
      named_sync(1, kConsumers);
      const int each = heads * Shape::kFloats;
      send(partials + static_cast<int64_t>(task) * each, stamp);
      join(partials + static_cast<int64_t>(task - split) * each, attended + m * stride, v_scale, stamp);
      named_sync(1, kConsumers);
    }
  }
};

}  // namespace pyllm::step
