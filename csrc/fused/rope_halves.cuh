// qk_norm_rope_append of the common case: bf16 or fp16, D = 64, 128 or 256, R = D, pairs (i, i + D / 2). The formulas are those of
// qk_norm_rope_append.cuh.
//
// Layout: D / 16 neighbouring lanes own a head, each the 8 values from 8 * lane on in either half, so that a warp reads and writes 1 KB of
// neighbouring heads of one kind (Q, K or V) per pass. The passes of a token are numbered Q, K, V; a warp takes neighbouring ones and
// keeps cosines and sines, times the norm weights of the kind, in registers. V in the dtype of the cache is copied as it is.
// Bulk (many tokens): one asynchronous copy brings the heads of a CTA to shared memory, so that the bytes in flight cost no registers
// and one instruction; else (few tokens) a warp has one pass and loads it directly, which is a shorter chain.
// Limits: those above, norm weights at multiples of 16 bytes; the launch hands everything else to qk_norm_rope_append_kernel.
#pragma once
#include "common/dispatch.h"
#include "fused/qk_norm_rope_append.cuh"

namespace pyllm::fused {

// Measured on an H200, T = 8192, 32 + 2 * 8 heads of 128, bf16, as the share of a copy of the same bytes: 94.8 %, with the norm 92.8 %.
// One warp of 12 passes 93.7 % and 88.5 %; two CTAs of 2 warps x 3 passes 94.6 % and 90.9 %; without the bulk copy 81.9 % and 73.3 %.
constexpr int kHalvesWarps = 2;
constexpr int kHalvesPasses = 6;    // of a warp at most, 1 KB of shared memory each
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

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// By one thread: `bytes` (a multiple of 16) to shared memory, counted by the barrier.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
__device__ __forceinline__ void wait_barrier(uint64_t* barrier) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier))
      : "memory");
}

// grid (T, pieces): a piece is `passes` passes of each warp.
template <class T, int Dim, bool Norm, bool Fp8, bool Bulk>
__global__ void __launch_bounds__(kHalvesWarps * 32, kHalvesMinCtas)
    rope_halves_kernel(const __grid_constant__ QkNormRopeAppendParams p, const __grid_constant__ HalvesPlan plan) {
  constexpr int kHalf = Dim / 2, kLanes = Dim / 16, kHeads = 32 / kLanes;
  __shared__ __align__(128) uint8_t heads[Bulk ? kHalvesWarps * kHalvesPasses * kPassBytes : 16];
  __shared__ uint64_t barrier;
  const int64_t token = blockIdx.x;
  const int all = plan.q_passes + 2 * plan.kv_passes;
  const int cta_begin = blockIdx.y * plan.passes * kHalvesWarps, cta_end = min(all, cta_begin + plan.passes * kHalvesWarps);
  const int begin = cta_begin + threadIdx.x / 32 * plan.passes, end = min(cta_end, begin + plan.passes);
  const int sub = threadIdx.x % 32 / kLanes, at = threadIdx.x % kLanes * kChunk;
  const T* const row = static_cast<const T*>(p.qkv) + token * p.qkv_stride;
  const Pass first = pass_at(p, plan, begin, kHeads);
  const Pass cta_first = pass_at(p, plan, cta_begin, kHeads);
  const int cta_head = cta_first.before + cta_first.local;
  const bool turns = begin < end && first.kind != kV;
  float w[2][kChunk];
  if (Norm && !Bulk && turns) Turn<Norm>::template load_weight<T>(p, first.kind, at, kHalf, w);
  if (Bulk && threadIdx.x == 0) init_barrier(&barrier);

  pdl_wait();
  uint4 raw[2] = {};
  if constexpr (Bulk) {
    if (threadIdx.x == 0) {
      const Pass last = pass_at(p, plan, cta_end - 1, kHeads);
      const int count = last.before + min(last.heads, last.local + kHeads) - cta_head;
      copy_bulk(heads, row + cta_head * Dim, count * Dim * sizeof(T), &barrier);
    }
  } else if (begin < end && first.local + sub < first.heads) {
    const T* const x = row + (first.before + first.local + sub) * Dim + at;
    raw[0] = load_vector(x), raw[1] = load_vector(x + kHalf);
  }
  const float* const line = p.cos_sin + static_cast<int64_t>(p.rows[token]) * Dim;
  const Lines<T, Fp8> to(p, plan.page, token);
  Turn<Norm> turn;
  if (turns) turn.load(line, at, kHalf);
  pdl_trigger();
  if (Norm && turns) {
    if constexpr (Bulk) Turn<Norm>::template load_weight<T>(p, first.kind, at, kHalf, w);
    turn.weigh(w);
  }
  if constexpr (Bulk) {
    __syncthreads();  // the barrier is initialised
    wait_barrier(&barrier);
  }

  int kind = first.kind;
#pragma unroll 1
  for (int index = begin; index < end; ++index) {
    const Pass pass = pass_at(p, plan, index, kHeads);
    if (Norm && pass.kind == kK && kind == kQ) {
      Turn<Norm>::template load_weight<T>(p, kK, at, kHalf, w);
      turn.load(line, at, kHalf);
      turn.weigh(w);
    }
    kind = pass.kind;
    const int local = pass.local + sub;
    const bool exists = local < pass.heads;
    if constexpr (Bulk) {
      if (exists) {
        const T* const x = reinterpret_cast<const T*>(heads) + (pass.before + local - cta_head) * Dim + at;
        raw[0] = *reinterpret_cast<const uint4*>(x), raw[1] = *reinterpret_cast<const uint4*>(x + kHalf);
      }
    }
    if (kind != kQ && !to.stored) continue;
    if (!Fp8 && kind == kV) {
      T* const v = reinterpret_cast<T*>(to.v) + local * Dim + at;
      if (exists) store_vector(v, raw[0]), store_vector(v + kHalf, raw[1]);
      continue;
    }
    float y[2][kChunk];
    unpack<T>(raw[0], y[0]);
    unpack<T>(raw[1], y[1]);
    if (kind != kV) {
      float factor = 1.f;
      if (Norm && (kind == kQ ? p.q_weight : p.k_weight) != nullptr) {
        float squares[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 2 * kChunk; ++i)
          squares[i / kChunk] = fmaf(y[i / kChunk][i % kChunk], y[i / kChunk][i % kChunk], squares[i / kChunk]);
        const float sum = warp_reduce<SumOp, kLanes>(squares[0] + squares[1], SumOp{});
        factor = rsqrtf(fmaf(sum, 1.f / Dim, p.eps));
      }
      turn.apply(y, factor);
    }
    if (!exists) continue;
    if (Fp8 && kind != kQ) {
      const float* const scale = kind == kK ? p.k_scale : p.v_scale;
      const float inverse = scale == nullptr ? 1.f : 1.f / scale[local * (kind == kK ? p.k_scale_step : p.v_scale_step)];
      uint8_t* const e = reinterpret_cast<uint8_t*>(kind == kK ? to.k : to.v) + local * Dim + at;
      store_chunk_e4m3(e, y[0], inverse);
      store_chunk_e4m3(e + kHalf, y[1], inverse);
    } else {
      T* const out = (kind == kQ ? to.q : reinterpret_cast<T*>(to.k)) + local * Dim + at;
      store_vector(out, pack<T>(y[0]));
      store_vector(out + kHalf, pack<T>(y[1]));
    }
  }
}

template <class T, int Dim, bool Norm, bool Fp8>
void launch_rope_halves(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  constexpr int kHeads = 512 / Dim, kWarps = kHalvesWarps, kPasses = kWarps * kHalvesPasses;
  const int q_passes = (p.heads + kHeads - 1) / kHeads, kv_passes = (p.kv_heads + kHeads - 1) / kHeads;
  const int all = q_passes + 2 * kv_passes, spread = (all + kWarps - 1) / kWarps;
  const RowSplit page = row_split(std::max(p.page, 1));
  const auto tokens = static_cast<unsigned>(p.tokens);
  if (p.tokens * spread <= static_cast<int64_t>(sm_count()) * kHalvesSpreadCtas) {
    launch("qk_norm_rope_append", {dim3(tokens, static_cast<unsigned>(spread)), kWarps * 32}, stream,
           rope_halves_kernel<T, Dim, Norm, Fp8, false>, p, HalvesPlan{1, q_passes, kv_passes, page});
    return;
  }
  const int pieces = (all + kPasses - 1) / kPasses;
  const int passes = (all + pieces * kWarps - 1) / (pieces * kWarps);
  launch("qk_norm_rope_append", {dim3(tokens, static_cast<unsigned>((all + passes * kWarps - 1) / (passes * kWarps))), kWarps * 32}, stream,
         rope_halves_kernel<T, Dim, Norm, Fp8, true>, p, HalvesPlan{passes, q_passes, kv_passes, page});
}

// Whether it took the call.
template <class T, bool Fp8>
bool launch_if_halves(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    return false;
  } else {
    const auto unaligned = reinterpret_cast<uintptr_t>(p.q_weight) | reinterpret_cast<uintptr_t>(p.k_weight);
    const bool has_kernel = p.dim == 64 || p.dim == 128 || p.dim == 256;
    if (!has_kernel || p.rotary != p.dim || p.interleaved || unaligned % 16 != 0) return false;
    dispatch<64, 128, 256>("qk_norm_rope_append: head dimension", p.dim, [&](auto dim) {
      dispatch_bool(p.q_weight != nullptr || p.k_weight != nullptr,
                    [&](auto norm) { launch_rope_halves<T, decltype(dim)::value, decltype(norm)::value, Fp8>(p, stream); });
    });
    return true;
  }
}

}  // namespace pyllm::fused
