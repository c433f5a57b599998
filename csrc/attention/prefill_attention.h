#pragma once
#include "common/params.h"

namespace pyllm {

// T query rows of B sequences, H query heads in groups of G = H / K. Keys and values are either contiguous (page_table is null: rows of
// all sequences one after the other, bounded by kv_starts) or pages of a cache (page_table and kv_lens).
// Row j of a sequence with n rows and L keys stands at position p = L - n + j.
struct PrefillAttentionParams {
  const void* q;           // [T, H, D] dtype, dense in D, rows at multiples of 16 bytes
  int64_t q_token_stride;  // elements
  int64_t q_head_stride;   // elements
  const void* k;           // contiguous: [S, K, D]; paged: [pages, P, K, D]; q's dtype, dense in D, rows at multiples of 16 bytes
  const void* v;           // contiguous: [S, K, Dv]; paged: [pages, P, K, Dv]
  int64_t k_token_stride;  // elements
  int64_t k_head_stride;   // elements
  int64_t k_page_stride;   // elements; paged only
  int64_t v_token_stride;  // elements
  int64_t v_head_stride;   // elements
  int64_t v_page_stride;   // elements; paged only
  int64_t key_rows;        // S, or pages
  const int* q_starts;     // [B + 1]
  const int* kv_starts;    // [B + 1], contiguous keys; else null
  const int* kv_lens;      // [B], paged keys; else null
  const int* page_table;   // [B, W], dense in W; null: contiguous keys. Entries past ceil(L / P) are never read
  int64_t table_stride;    // elements
  const float* sinks;      // [H] or null: a logit that joins the denominator
  const uint32_t* mask;  // [T, mask_words] or null: bit i % 32 of word i / 32 of a row allows key mask_starts[b] + i; the keys outside the
                         // bits are not touched by the mask. It combines (and) with causal and window
  int64_t mask_stride;   // words from row to row
  int mask_words;        // words of a row
  const int* mask_starts;  // [B], or null: the bits begin at key L - n (a tree over the step's own tokens)
  const float* q_scale;    // e4m3 q: value = stored * scale, at token * q_scale_token_step + head * q_scale_head_step (0, 0 for [1])
  int64_t q_scale_token_step;
  int64_t q_scale_head_step;
  const float* k_scale;  // e4m3 keys, or null: at sequence * k_scale_batch_step + kv_head * k_scale_head_step
  const float* v_scale;  // like k_scale
  int k_scale_batch_step;
  int k_scale_head_step;
  int v_scale_batch_step;
  int v_scale_head_step;
  void* out;                     // [T, H, Dv] out_dtype, contiguous
  float* lse;                    // [T, H], natural log, or null
  int64_t tokens;                // T
  int batch;                     // B
  int heads;                     // H
  int kv_heads;                  // K
  int group;                     // G
  int dim;                       // D of q and k
  int v_dim;                     // Dv
  int page_shift;                // log2 of P; paged only
  int window;                    // a row sees keys > p - window; 0: all
  int skip_rows;                 // sequences with at most so many rows are neither read nor written
  bool causal;                   // a row sees keys <= p
  bool beside;                   // the launch before it writes nothing that this one reads or writes: waited for at the end alone
  int first_ctas, all_ctas;      // two launches share the tiles: so many CTAs the first of them, and both; 0: one launch does all
  bool leads;                    // the next launch runs beside this one, on the SMs that it leaves
  bool second;                   // the latter of the two that share
  float scale;                   // of the scores
  float softcap;                 // 0: none
  DType dtype;                   // of q, k, v: kBF16, kFP16, kE4M3
  DType out_dtype;               // dtype, or kBF16 for kE4M3
  unsigned long long* schedule;  // two words of scratch of this launch (or pair) alone, uninitialised: the tile counter of prefill_work.cuh
  unsigned long long launch;     // this launch's (or pair's) mark in `schedule`; 0: the launcher sets it
};

// A mark of 40 bits, not 0, that no other launch of this process has, for PrefillAttentionParams::launch.
unsigned long long next_prefill_launch();

// Rows past q_starts[B] and rows without a key are written too: 0 and -inf (the sink's logit if there are sinks and a sequence).
// Every launch shape follows from T, B and the shapes alone.
void prefill_attention(const PrefillAttentionParams& p, cudaStream_t stream);

// The e4m3 kernel behind it (prefill_fp8.cu).
void prefill_attention_fp8(const PrefillAttentionParams& p, cudaStream_t stream);

}  // namespace pyllm
