// What the plain attention kernel gets; compiles under NVRTC. pyllm/jit/params.py mirrors the layout for kernels that are compiled at run
// time, and their source asserts its size.
#pragma once
#include <cstdint>

namespace pyllm {

// T query rows of B sequences, H query heads in groups of G = H / K. Keys are rows of all sequences one after the other (page_table is
// null; kv_starts) or pages (page_table and kv_lens). Row j of a sequence with n rows and L keys stands at position p = L - n + j.
struct SimpleAttentionParams {
  const void* q;           // [T, H, D], dense in D, rows at multiples of 16 bytes
  const void* k;           // contiguous: [S, K, D]; paged: [pages, P, K, D]; q's dtype or e4m3, dense in D, rows at multiples of 16 bytes
  const void* v;           // like k, of width Dv
  int64_t q_token_stride;  // this and all strides: elements
  int64_t q_head_stride;
  int64_t k_token_stride;
  int64_t k_head_stride;
  int64_t k_page_stride;  // paged only
  int64_t v_token_stride;
  int64_t v_head_stride;
  int64_t v_page_stride;
  const int* q_starts;    // [B + 1]
  const int* kv_starts;   // [B + 1] or null
  const int* kv_lens;     // [B] or null
  const int* page_table;  // [B, W], dense in W, or null
  int64_t table_stride;
  const float* sinks;      // [H] or null: a logit that joins the denominator
  const uint32_t* mask;    // [T, mask_words] or null: bit i % 32 of word i / 32 allows key mask_starts[b] + i; keys outside are not touched
  int64_t mask_stride;     // words from row to row
  const int* mask_starts;  // [B], or null: the bits begin at key L - n
  const float* k_scale;    // or null: value = stored * scale, of KV head i at i * k_scale_step
  const float* v_scale;
  void* out;           // [T, H, Dv] of q's dtype, contiguous
  float* lse;          // [T, H], natural log
  float* partial;      // [splits, T, H, Dv]: results over one split of the keys; null for one split
  float* partial_lse;  // [splits, T, H]
  uint64_t slots[8];   // of a variant: addresses of its tensors, bits of its floats
  int64_t tokens;      // T; T * G < 2^31
  int batch;
  int heads;
  int kv_heads;
  int group;
  int page_shift;  // log2 of P; paged only
  int mask_words;
  int window;        // a row sees keys > p - window; 0: all
  int causal;        // 1: a row sees keys <= p
  int k_scale_step;  // 0 for one scale, 1 for one per KV head
  int v_scale_step;
  int splits;      // CTAs that share the keys of one tile of rows
  int first_head;  // of all heads, where this rank's begin: what a variant is told
  float scale;     // of the scores
  float softcap;   // 0: none
};

}  // namespace pyllm
