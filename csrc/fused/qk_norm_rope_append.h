// qk_norm_rope_append: per-head RMS norm and rotation of Q and K, K and V into the paged cache, Q out.
#pragma once
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace pyllm {

enum class KvCache : int { kLikeQkv, kE4M3, kS8 };

struct QkNormRopeAppendParams {
  const void* qkv;        // [T, (H + 2K) * D] of dtype, row stride qkv_stride, rows at multiples of 16 bytes
  void* q;                // [T, H, D] of dtype, contiguous
  const float* cos_sin;   // [L, R] fp32, contiguous; null: no rotation
  const int32_t* rows;    // [T], lines of cos_sin
  const void* q_weight;   // [D] fp32 or dtype, a constant; null: no norm of Q
  const void* k_weight;   // [D] fp32 or dtype, a constant; null: no norm of K
  void* k_cache;          // [pages, P, K, D] of dtype, e4m3 or s8, page stride k_page_stride, a page dense; null when K = 0
  void* v_cache;          // like k_cache
  const int32_t* slots;   // [T]; < 0: not stored
  const float* k_scale;   // fp32 [1] or [K], dequantisation scale of an e4m3 or s8 cache; null: 1
  const float* v_scale;   // like k_scale
  int64_t tokens;         // T
  int64_t qkv_stride;     // elements
  int64_t k_page_stride;  // elements
  int64_t v_page_stride;  // elements
  int heads;              // H
  int kv_heads;           // K
  int dim;                // D, a multiple of 8, at most 256
  int rotary;             // R, even, at most D; 0 without cos_sin
  int page;               // P
  int k_scale_step;       // 1: a scale per KV head, 0: one for all
  int v_scale_step;       // like k_scale_step
  float eps;              // of the norm
  bool interleaved;       // pairs (2i, 2i + 1), else (i, i + R / 2)
  bool q_weight_fp32;     // q_weight is fp32, else dtype
  bool k_weight_fp32;     // like q_weight_fp32
  KvCache cache;          // what the caches hold
  DType dtype;            // bf16, fp16, fp32
};

void qk_norm_rope_append(const QkNormRopeAppendParams& p, cudaStream_t stream);

}  // namespace pyllm
