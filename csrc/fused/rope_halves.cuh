// qk_norm_rope_append of the common case: bf16 or fp16, D = 64, 128 or 256, R = D, pairs (i, i + D / 2). The formulas are those of
// qk_norm_rope_append.cuh.
//
// Layout: D / 16 neighbouring lanes own a head, each the 8 values from 8 * lane on in either half, so that a warp reads and writes 1 KB of
// neighbouring heads of one kind (Q, K or V) per pass. The passes of a token are numbered Q, K, V; a warp takes neighbouring ones and
// keeps cosines and sines, times the norm weights of the kind, in registers. V in the dtype of the cache is copied as it is.
// Many tokens, rope_bulk_kernel: one asynchronous copy brings the heads of a CTA to shared memory, so that the bytes in flight cost no
// registers and one instruction. Few tokens, rope_halves_kernel: a warp has one pass and loads it directly, which is a shorter chain.
// Measured: H200, T = 8192, 32 + 2 * 8 heads of 128, bf16, as the share of a copy of the same bytes: 95.7 %, fp8 cache 95.2 %, with the
// norm 94.0 % (slots in order: 96.2 % and, with the norm, 95.9 %).
// Limits: those above, norm weights at multiples of 16 bytes; the launch hands everything else to qk_norm_rope_append_kernel.
#pragma once
#include "common/dispatch.h"
#include "fused/qk_norm_rope_append.cuh"

namespace pyllm::fused {

constexpr int kHalvesWarps = 2;
constexpr int kHalvesMinCtas = 12;  // caps a thread at 80 registers
// Up to this many CTAs per SM, a pass per warp, straight from global memory: one wave, and the shortest chain.
constexpr int kHalvesSpreadCtas = 12;
constexpr int kPassBytes = 1024;

struct HalvesPlan {
  int passes;    // of a warp
  int q_passes;  // of a token
  int kv_passes;
  RowSplit page;
};

// Neighbouring heads of one kind: what a warp does at once.
struct Pass {
  int kind;
  int local;   // first head among those of its kind
  int heads;   // of the kind
  int before;  // heads of other kinds ahead of it in a row
};
__device__ __forceinline__ Pass pass_at(const QkNormRopeAppendParams& p, const HalvesPlan& plan, int pass, int heads_of_pass) {
  if (pass < plan.q_passes) return {kQ, pass * heads_of_pass, p.heads, 0};
  pass -= plan.q_passes;
  if (pass < plan.kv_passes) return {kK, pass * heads_of_pass, p.kv_heads, p.heads};
  return {kV, (pass - plan.kv_passes) * heads_of_pass, p.kv_heads, p.heads + p.kv_heads};
}

__device__ __forceinline__ void load_eight(const float* p, float* out) {
  load_four(p, out);
  load_four(p + 4, out + 4);
}

// What a pair (a, b) is multiplied by: a' = a ac - b bs, b' = b bc + a as. Without a norm ac = bc = c and as = bs = s.
template <bool Norm>
struct Turn {
  float c[Norm ? 2 : 1][kChunk], s[Norm ? 2 : 1][kChunk];

  // The two chunks of the norm weight of a kind, 1 where it has none. Constants: may run ahead of the wait.
  template <class T>
  static __device__ __forceinline__ void load_weight(const QkNormRopeAppendParams& p, int kind, int at, int half, float (&w)[2][kChunk]) {
    const void* const weight = kind == kQ ? p.q_weight : p.k_weight;
    const bool fp32 = kind == kQ ? p.q_weight_fp32 : p.k_weight_fp32;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (weight == nullptr) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) w[k][i] = 1.f;
      } else if (fp32) {
        load_eight(static_cast<const float*>(weight) + at + k * half, w[k]);
      } else {
        unpack<T>(*reinterpret_cast<const uint4*>(static_cast<const T*>(weight) + at + k * half), w[k]);
      }
    }
  }

  __device__ __forceinline__ void load(const float* line, int at, int half) {
    load_eight(line + at, c[0]);
    load_eight(line + half + at, s[0]);
  }
  __device__ __forceinline__ void weigh(const float (&w)[2][kChunk]) {
    if constexpr (Norm) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        c[1][i] = c[0][i] * w[1][i], s[1][i] = s[0][i] * w[1][i];
        c[0][i] *= w[0][i], s[0][i] *= w[0][i];
      }
    }
  }
  // Explicit fmaf: the bits must not depend on the kernel that this is inlined into.
  __device__ __forceinline__ void apply(float (&y)[2][kChunk], float factor) const {
    constexpr int kSecond = Norm ? 1 : 0;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float a = y[0][i], b = y[1][i];
      y[0][i] = fmaf(a, c[0][i], -(b * s[kSecond][i]));
      y[1][i] = fmaf(b, c[kSecond][i], a * s[0][i]);
      if constexpr (Norm) y[0][i] *= factor, y[1][i] *= factor;
    }
  }
};

__device__ __forceinline__ float sum_of_squares(const float (&y)[2][kChunk]) {
  float squares[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 2 * kChunk; ++i)
    squares[i / kChunk] = fmaf(y[i / kChunk][i % kChunk], y[i / kChunk][i % kChunk], squares[i / kChunk]);
  return squares[0] + squares[1];
}

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Before sm_90 these instructions do not exist, and launch_if_halves takes nothing.
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// By one thread: `bytes` (a multiple of 16) to shared memory, counted by the barrier.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}
__device__ __forceinline__ void wait_barrier(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier))
      : "memory");
#endif
}

// grid (T, pieces): a piece is one pass of each warp.
template <class T, int Dim, bool Norm, bool Byte>
__global__ void __launch_bounds__(kHalvesWarps * 32, kHalvesMinCtas)
    rope_halves_kernel(const __grid_constant__ QkNormRopeAppendParams p, const __grid_constant__ HalvesPlan plan) {
  constexpr int kHalf = Dim / 2, kLanes = Dim / 16, kHeads = 32 / kLanes;
  const int64_t token = blockIdx.x;
  const int index = blockIdx.y * kHalvesWarps + threadIdx.x / 32;
  if (index >= plan.q_passes + 2 * plan.kv_passes) return;
  const int sub = threadIdx.x % 32 / kLanes, at = threadIdx.x % kLanes * kChunk;
  const Pass pass = pass_at(p, plan, index, kHeads);
  const int kind = pass.kind, local = pass.local + sub;
  const bool turns = kind != kV, exists = local < pass.heads;
  float w[2][kChunk];
  if (Norm && turns) Turn<Norm>::template load_weight<T>(p, kind, at, kHalf, w);

  pdl_wait();
  uint4 raw[2] = {};
  if (exists) {
    const T* const x = static_cast<const T*>(p.qkv) + token * p.qkv_stride + (pass.before + local) * Dim + at;
    raw[0] = load_vector(x), raw[1] = load_vector(x + kHalf);
  }
  const float* const line = p.cos_sin + static_cast<int64_t>(p.rows[token]) * Dim;
  const Lines<T, Byte> to(p, plan.page, token);
  Turn<Norm> turn;
  if (turns) turn.load(line, at, kHalf);
  pdl_trigger();
  if (kind != kQ && !to.stored) return;
  if (!Byte && kind == kV) {
    T* const v = reinterpret_cast<T*>(to.v) + local * Dim + at;
    if (exists) store_vector(v, raw[0]), store_vector(v + kHalf, raw[1]);
    return;
  }
  float y[2][kChunk];
  unpack<T>(raw[0], y[0]);
  unpack<T>(raw[1], y[1]);
  if (turns) {
    float factor = 1.f;
    if (Norm && (kind == kQ ? p.q_weight : p.k_weight) != nullptr)
      factor = rsqrtf(fmaf(warp_reduce<SumOp, kLanes>(sum_of_squares(y), SumOp{}), 1.f / Dim, p.eps));
    if constexpr (Norm) turn.weigh(w);
    turn.apply(y, factor);
  }
  if (!exists) return;
  if (Byte && kind != kQ) {
    const float* const scale = kind == kK ? p.k_scale : p.v_scale;
    const float inverse = scale == nullptr ? 1.f : 1.f / scale[local * (kind == kK ? p.k_scale_step : p.v_scale_step)];
    uint8_t* const e = reinterpret_cast<uint8_t*>(kind == kK ? to.k : to.v) + local * Dim + at;
    store_chunk_byte(p, e, y[0], inverse);
    store_chunk_byte(p, e + kHalf, y[1], inverse);
  } else {
    T* const out = (kind == kQ ? to.q : reinterpret_cast<T*>(to.k)) + local * Dim + at;
    store_vector(out, pack<T>(y[0]));
    store_vector(out + kHalf, pack<T>(y[1]));
  }
}

// Measured as in the header, plain and with the norm, slots in any order. 2 warps x 6 passes, 12 CTAs per SM: 95.0 % and 92.9 %. Results
// written over the row in shared memory and sent by bulk stores: 95.0 % and 91.5 % with that shape, 95.3 % and 93.1 % with this one.
// Without pairs of passes, 2 warps x 6 passes: 94.6 % and 92.9 %. At 32 + 2 * 8 heads of 128 two warps have Q only and one K and V,
// so that a warp loads one table, and 96 KB of an SM's shared memory are in flight.
constexpr int kBulkWarps = 3;
constexpr int kBulkPasses = 4;  // of a warp at most, 1 KB of shared memory each
// Caps a thread at 80 registers; the norm with an fp8 cache needs more.
template <bool Norm, bool Byte>
inline constexpr int kBulkMinCtas = Norm && Byte ? 6 : 8;

// N neighbouring passes at once, so that N chains of reduce, root and turn overlap. x: the first chunk of this lane in shared memory;
// store(n, y): the two chunks of pass n.
template <class T, int Dim, bool Norm, int N, class Store>
__device__ __forceinline__ void turn_passes(const T* x, const Turn<Norm>& turn, bool normed, float eps, Store&& store) {
  constexpr int kLanes = Dim / 16, kStep = kPassBytes / sizeof(T);
  uint4 raw[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n) raw[n][0] = load_vector(x + n * kStep), raw[n][1] = load_vector(x + n * kStep + Dim / 2);
  float factor[N];
#pragma unroll
  for (int n = 0; n < N; ++n) factor[n] = 1.f;
  if (Norm && normed) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float y[2][kChunk];
      unpack<T>(raw[n][0], y[0]);
      unpack<T>(raw[n][1], y[1]);
      factor[n] = sum_of_squares(y);
    }
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int n = 0; n < N; ++n) factor[n] += __shfl_xor_sync(0xffffffffu, factor[n], offset);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) factor[n] = rsqrtf(fmaf(factor[n], 1.f / Dim, eps));
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float y[2][kChunk];
    unpack<T>(raw[n][0], y[0]);
    unpack<T>(raw[n][1], y[1]);
    turn.apply(y, factor[n]);
    store(n, y);
  }
}

// grid (T, pieces): a piece is `passes` passes of each warp.
template <class T, int Dim, bool Norm, bool Byte>
__global__ void __launch_bounds__(kBulkWarps * 32, kBulkMinCtas<Norm, Byte>)
    rope_bulk_kernel(const __grid_constant__ QkNormRopeAppendParams p, const __grid_constant__ HalvesPlan plan) {
  constexpr int kHalf = Dim / 2, kLanes = Dim / 16, kHeads = 32 / kLanes, kStep = kHeads * Dim;
  __shared__ __align__(128) uint8_t heads[kBulkWarps * kBulkPasses * kPassBytes];
  __shared__ uint64_t barrier;
  const int64_t token = blockIdx.x;
  const int all = plan.q_passes + 2 * plan.kv_passes;
  const int cta_begin = blockIdx.y * plan.passes * kBulkWarps, cta_end = min(all, cta_begin + plan.passes * kBulkWarps);
  const Pass cta_first = pass_at(p, plan, cta_begin, kHeads);
  const int cta_head = cta_first.before + cta_first.local;
  if (threadIdx.x == 0) {
    const Pass last = pass_at(p, plan, cta_end - 1, kHeads);
    const int count = last.before + min(last.heads, last.local + kHeads) - cta_head;
    const T* const from = static_cast<const T*>(p.qkv) + token * p.qkv_stride + cta_head * Dim;
    init_barrier(&barrier);
    pdl_wait();
    copy_bulk(heads, from, count * Dim * sizeof(T), &barrier);
  } else {
    pdl_wait();
  }
  const float* const line = p.cos_sin + static_cast<int64_t>(p.rows[token]) * Dim;
  const Lines<T, Byte> to(p, plan.page, token);
  const int sub = threadIdx.x % 32 / kLanes, at = threadIdx.x % kLanes * kChunk;
  const int begin = cta_begin + threadIdx.x / 32 * plan.passes, end = min(cta_end, begin + plan.passes);
  Turn<Norm> turn;
  const auto set_turn = [&](int kind) {
    float w[2][kChunk];
    turn.load(line, at, kHalf);
    if constexpr (Norm) Turn<Norm>::template load_weight<T>(p, kind, at, kHalf, w);
    turn.weigh(w);
  };
  int kind = begin < end ? pass_at(p, plan, begin, kHeads).kind : kV;
  if (kind != kV) set_turn(kind);
  pdl_trigger();
  __syncthreads();  // the barrier is initialised
  wait_barrier(&barrier);

  int passes = 0;  // of one kind
#pragma unroll 1
  for (int index = begin; index < end; index += passes) {
    const Pass pass = pass_at(p, plan, index, kHeads);
    passes = min(end, pass.kind == kQ ? plan.q_passes : pass.kind == kK ? plan.q_passes + plan.kv_passes : all) - index;
    if (Norm && pass.kind == kK && kind == kQ) set_turn(kK);
    kind = pass.kind;
    if (kind != kQ && !to.stored) continue;
    const int exist = min(passes * kHeads, pass.heads - pass.local);  // heads of these passes
    const T* const x = reinterpret_cast<const T*>(heads) + (pass.before + pass.local - cta_head) * Dim + sub * Dim + at;
    if (Byte && kind != kQ) {
      const float* const scale = kind == kK ? p.k_scale : p.v_scale;
      const int step = kind == kK ? p.k_scale_step : p.v_scale_step;
      uint8_t* const e = reinterpret_cast<uint8_t*>(kind == kK ? to.k : to.v) + (pass.local + sub) * Dim + at;
#pragma unroll 1
      for (int k = 0; k < passes; ++k) {
        const int head = k * kHeads + sub;
        const bool exists = head < exist;
        const float inverse = scale == nullptr || !exists ? 1.f : 1.f / scale[(pass.local + head) * step];
        const auto store = [&](int, const float (&y)[2][kChunk]) {
          if (!exists) return;
          store_chunk_byte(p, e + k * kStep, y[0], inverse);
          store_chunk_byte(p, e + k * kStep + kHalf, y[1], inverse);
        };
        if (kind == kK) {
          turn_passes<T, Dim, Norm, 1>(x + k * kStep, turn, p.k_weight != nullptr, p.eps, store);
        } else {
          float y[2][kChunk];
          unpack<T>(load_vector(x + k * kStep), y[0]);
          unpack<T>(load_vector(x + k * kStep + kHalf), y[1]);
          store(0, y);
        }
      }
      continue;
    }
    T* const out = (kind == kQ ? to.q : reinterpret_cast<T*>(kind == kK ? to.k : to.v)) + pass.local * Dim;
    if (kind == kV) {
      T* const v = out + sub * Dim + at;
#pragma unroll 1
      for (int k = 0; k < passes; ++k) {
        const uint4 a = load_vector(x + k * kStep), b = load_vector(x + k * kStep + kHalf);
        if (k * kHeads + sub < exist) store_vector(v + k * kStep, a), store_vector(v + k * kStep + kHalf, b);
      }
      continue;
    }
    const bool normed = (kind == kQ ? p.q_weight : p.k_weight) != nullptr;
    T* const y_out = out + sub * Dim + at;
    int k = 0;
    const auto store = [&](int n, const float (&y)[2][kChunk]) {
      if ((k + n) * kHeads + sub >= exist) return;
      store_vector(y_out + (k + n) * kStep, pack<T>(y[0]));
      store_vector(y_out + (k + n) * kStep + kHalf, pack<T>(y[1]));
    };
#pragma unroll 1
    for (; k + 2 <= passes; k += 2) turn_passes<T, Dim, Norm, 2>(x + k * kStep, turn, normed, p.eps, store);
    if (k < passes) turn_passes<T, Dim, Norm, 1>(x + k * kStep, turn, normed, p.eps, store);
  }
}

template <class T, int Dim, bool Norm, bool Byte>
void launch_rope_halves(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  constexpr int kHeads = 512 / Dim, kWarps = kHalvesWarps;
  const int q_passes = (p.heads + kHeads - 1) / kHeads, kv_passes = (p.kv_heads + kHeads - 1) / kHeads;
  const int all = q_passes + 2 * kv_passes, spread = (all + kWarps - 1) / kWarps;
  const RowSplit page = row_split(std::max(p.page, 1));
  const auto tokens = static_cast<unsigned>(p.tokens);
  if (p.tokens * spread <= static_cast<int64_t>(sm_count()) * kHalvesSpreadCtas) {
    launch("qk_norm_rope_append", {dim3(tokens, static_cast<unsigned>(spread)), kWarps * 32}, stream,
           rope_halves_kernel<T, Dim, Norm, Byte>, p, HalvesPlan{1, q_passes, kv_passes, page});
    return;
  }
  constexpr int kPasses = kBulkWarps * kBulkPasses;
  const int pieces = (all + kPasses - 1) / kPasses;
  const int passes = (all + pieces * kBulkWarps - 1) / (pieces * kBulkWarps);
  const dim3 grid(tokens, static_cast<unsigned>((all + passes * kBulkWarps - 1) / (passes * kBulkWarps)));
  launch("qk_norm_rope_append", {grid, kBulkWarps * 32}, stream, rope_bulk_kernel<T, Dim, Norm, Byte>, p,
         HalvesPlan{passes, q_passes, kv_passes, page});
}

// Whether it took the call.
template <class T, bool Byte>
bool launch_if_halves(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    return false;
  } else {
    const auto unaligned = reinterpret_cast<uintptr_t>(p.q_weight) | reinterpret_cast<uintptr_t>(p.k_weight);
    const bool has_kernel = p.dim == 64 || p.dim == 128 || p.dim == 256;
    if (device_architecture() < 90 || !has_kernel || p.rotary != p.dim || p.interleaved || unaligned % 16 != 0) return false;
    dispatch<64, 128, 256>("qk_norm_rope_append: head dimension", p.dim, [&](auto dim) {
      dispatch_bool(p.q_weight != nullptr || p.k_weight != nullptr,
                    [&](auto norm) { launch_rope_halves<T, decltype(dim)::value, decltype(norm)::value, Byte>(p, stream); });
    });
    return true;
  }
}

}  // namespace pyllm::fused
