#pragma once
#include "common/params.h"

namespace pyllm {

// T query rows of B sequences, H query heads in groups of G = H / K; W pages of P tokens at most per sequence.
struct DecodeAttentionParams {
  const void* q;           // [T, H, D] dtype, dense in D
  int64_t q_token_stride;  // elements
  int64_t q_head_stride;   // elements
  const void* k_cache;     // [pages, P, K, D] dtype or e4m3, [P, K, D] dense
  const void* v_cache;     // like k_cache
  int64_t k_page_stride;   // elements
  int64_t v_page_stride;   // elements
  const int* page_table;   // [B, W], dense in W
  int64_t table_stride;    // elements
  const int* q_starts;     // [B + 1]
  const int* kv_lens;      // [B]
  const float* sinks;      // [H] or null
  const float* k_scale;    // [1] or [K] or null: value = stored * scale
  const float* v_scale;    // [1] or [K] or null
  int k_scale_step;        // 0 for [1], 1 for [K]
  int v_scale_step;        // 0 for [1], 1 for [K]
  void* out;               // [T, H, D] dtype, contiguous
  float* lse;              // [T, H], natural log
  float* partial;          // [2 workers, 8 row_tiles, D]: what a worker knows of the segment it did not begin (0), did not end (1)
  float* partial_sums;     // [2 workers, 8 row_tiles, 2]: reference exponent and sum of each row of `partial`
  int64_t tokens;          // T
  int batch;               // B
  int heads;               // H
  int kv_heads;            // K
  int group;               // G
  int dim;                 // D: 64, 128 or 256
  int max_q;               // rows per sequence at most
  int page_shift;          // log2 of P >= 16
  int window;              // keys a row sees, 0: all
  float scale;             // of the scores
  float softcap;           // 0: none
  DType dtype;             // kBF16 or kFP16
  bool fp8_cache;          // the caches are e4m3
  int workers;             // CTAs of the decode grid
  int row_tiles;           // 8-row tiles of query rows that a CTA holds: 1 or 2
  int chunks;              // pieces of 8 row_tiles rows that the G max_q rows of a KV head make
};

// Fills workers, row_tiles and chunks from the shapes; max_keys: W * P. Depends on no device data, so a captured graph stays right.
void plan_decode_attention(DecodeAttentionParams& p, int64_t max_keys);

void decode_attention(const DecodeAttentionParams& p, cudaStream_t stream);

}  // namespace pyllm
