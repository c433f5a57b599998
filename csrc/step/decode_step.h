// decode_step: one token of each of up to 4 sequences through a whole pre-norm decoder, in one kernel.
#pragma once
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace pyllm {

constexpr int kStepRows = 4;
constexpr int kStepLayers = 128;

// The products of a layer, in their order, and the head behind the last one.
enum StepProduct : int { kStepQkv, kStepO, kStepUp, kStepDown, kStepHead, kStepProducts };

struct alignas(16) StepLayer {
  const void* weight[kStepHead];         // [N, K] bf16 or e4m3, contiguous; up: gate rows, then up rows
  const float* weight_scale[kStepHead];  // [N] of e4m3 weights, null for bf16
  const float* norm[2];                  // [d] before attention, before the MLP
  const void* qkv_bias;                  // [(H + 2 K) D] bf16 or null
  const float *q_norm, *k_norm;          // [D] or null
  void *k_cache, *v_cache;               // [pages, P, K, D]
  const float *k_scale, *v_scale;        // [1] or [K] of an e4m3 cache, null without one
};

struct StepParams {
  const int32_t *ids, *slots, *kv_lens, *page_table, *rope_rows;  // [M], the table [M, W]
  const float* cos_sin;                                           // [lines, R]
  const void *embed, *head;                                       // [V, d] bf16
  const float* norm;                                              // [d]
  void* logits;                                                   // [M, V] bf16
  void* workspace;
  int64_t page_stride;  // of the caches, elements
  int rows, layers, d, heads, kv_heads, head_dim, ffn, vocab, page, table_stride, rotary, act, k_scale_step, v_scale_step;
  float eps, softmax_scale;
  bool fp8_weights, fp8_cache;
  StepLayer layer[kStepLayers];
};

// Bytes of a workspace for steps of up to `rows` rows; zeroed once, then the kernel's own.
int64_t decode_step_workspace(int64_t rows, int64_t layers, int64_t d, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ffn);

// Whether x of so many rows leaves room for a ring of weights in shared memory, beside the pointers of kStepLayers layers.
bool decode_step_fits(int64_t rows, int64_t d, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ffn, bool fp8_weights);

void decode_step(const StepParams& p, int64_t workspace_bytes, cudaStream_t stream);

}  // namespace pyllm
