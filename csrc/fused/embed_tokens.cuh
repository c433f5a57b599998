// embed_tokens: out[t, i] = round(weight[ids[t] - first, i] * scale) in fp32; zeros where ids[t] - first is outside [0, V).
//
// Layout: weight [V, N] dense rows, any stride of a multiple of 16 bytes; out [T, N] contiguous. A thread owns Vectors 16-byte vectors
// of out; the ids come first (they are the predecessor's), then all table loads, then the stores.
// Limits: N a multiple of 8. The table is a constant of the model: it is read through the read-only path.
#pragma once
#include "fused/elementwise.cuh"
#include "fused/embed_tokens.h"

namespace pyllm::fused {

struct EmbedArgs {
  const int32_t* ids;
  const char* weight;
  char* out;
  int64_t row_bytes;  // of weight
  int64_t vocab, first;
  float scale;
  FlatPlan plan;  // of out
};

template <class T, int Threads, int Vectors>
__global__ void __launch_bounds__(Threads) embed_kernel(EmbedArgs a) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (Threads * Vectors) + threadIdx.x;
  RowCol at[Vectors];
#pragma unroll
  for (int k = 0; k < Vectors; ++k) at[k] = split_index(a.plan.split, begin + k * Threads);
  int32_t id[Vectors];
  pdl_wait();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    if (begin + k * Threads < a.plan.total) id[k] = a.ids[at[k].row];
  }
  uint4 raw[Vectors];
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    raw[k] = {0, 0, 0, 0};
    if (begin + k * Threads < a.plan.total) {
      const int64_t row = id[k] - a.first;
      if (row >= 0 && row < a.vocab) raw[k] = __ldg(reinterpret_cast<const uint4*>(a.weight + row * a.row_bytes + at[k].col * 16));
    }
  }
  pdl_trigger();
#pragma unroll
  for (int k = 0; k < Vectors; ++k) {
    const int64_t i = begin + k * Threads;
    if (i >= a.plan.total) break;
    if (a.scale != 1.f) {
      float v[kWidth<T>];
      unpack<T>(raw[k], v);
#pragma unroll
      for (int j = 0; j < kWidth<T>; ++j) v[j] *= a.scale;
      raw[k] = pack<T>(v);
    }
    store_out(a.out + i * 16, raw[k]);
  }
}

template <class T>
void launch_embed_tokens(const EmbedTokensParams& p, cudaStream_t stream) {
  constexpr int kVectors = PYLLM_EMBED_VECTORS;
  const EmbedArgs a{p.ids,
                    static_cast<const char*>(p.weight),
                    static_cast<char*>(p.out),
                    p.weight_stride * static_cast<int64_t>(sizeof(T)),
                    p.vocab,
                    p.first,
                    p.scale,
                    flat_plan(p.tokens, p.width / kWidth<T>, false)};
  if (a.plan.total == 0) return;
  if (is_large(a.plan.total)) {
    launch("embed_tokens", {ctas(a.plan.total, kThreads * kVectors), kThreads}, stream, embed_kernel<T, kThreads, kVectors>, a);
  } else {
    launch("embed_tokens", {ctas(a.plan.total, kSmallThreads), kSmallThreads}, stream, embed_kernel<T, kSmallThreads, 1>, a);
  }
}

}  // namespace pyllm::fused
