#pragma once
#include "common/params.h"

namespace pyllm {

enum class DecodeCache : int { kLikeQ, kE4M3, kS8 };

// T query rows of B sequences, H query heads in groups of G = H / K; W pages of P tokens at most per sequence.
struct DecodeAttentionParams {
  const void* q;            // [T, H, D] dtype, dense in D
  int64_t q_token_stride;   // elements
  int64_t q_head_stride;    // elements
  const void* k_cache;      // [pages, P, K, D] dtype, e4m3 or s8, [P, K, D] dense
  const void* v_cache;      // like k_cache
  int64_t k_page_stride;    // elements
  int64_t v_page_stride;    // elements
  const int* page_table;    // [B, W], dense in W
  int64_t table_stride;     // elements
  const int* q_starts;      // [B + 1]
  const int* kv_lens;       // [B]
  const float* sinks;       // [H] or null
  const float* k_scale;     // [1] or [K] or null: value = stored * scale
  const float* v_scale;     // [1] or [K] or null
  int k_scale_step;         // 0 for [1], 1 for [K]
  int v_scale_step;         // 0 for [1], 1 for [K]
  const uint32_t* mask;     // [T, mask_words] or null: bit i % 32 of word i / 32: the row sees new key i (key L - n + i) of its sequence
  int64_t mask_stride;      // words from row to row
  int mask_words;           // 1 or 2; 0 without a mask
  void* out;                // [T, H, D] dtype, contiguous
  float* lse;               // [T, H], natural log
  void* workspace;          // workspace_bytes, at a multiple of 16 bytes, of any content
  uint64_t stamp;           // a number that no other launch has: what a flag in the workspace is set to
  int64_t workspace_bytes;  // a multiple of 16
  int64_t tokens;           // T
  int batch;                // B
  int heads;                // H
  int kv_heads;             // K
  int group;                // G
  int dim;                  // D
  int max_q;                // rows per sequence at most; sequences with more are left alone: neither read nor written
  int usual_q;              // rows per sequence that the launch is sized for, at most max_q
  int page_shift;           // log2 of P >= 16
  int width;                // W
  int window;               // keys a row sees, 0: all
  float scale;              // of the scores
  float softcap;            // 0: none
  DType dtype;              // kBF16 or kFP16
  DecodeCache cache;        // what the caches hold
  bool invariant;           // the bits of a row do not depend on the other sequences
  bool beside;              // the launch before it writes nothing that this one reads or writes: waited for at the end alone
  bool leave_padding;       // rows of q past q_starts[B] are not written
  int clusters;             // of the grid
  int workers;              // of 2^cut_shift CTAs each; with lanes, groups of them
  int cluster_shift;        // log2 of the CTAs of a cluster
  int cut_shift;            // log2 of those of a worker where segments are cut, at most cluster_shift
  int step_shift;           // log2 of the keys of a step
  int segment_cost;         // what the end of a segment costs, in steps
  uint32_t share;           // ceil(2^32 / workers), 0 for one
  int whole_below;          // numbers of the work map up to which whole_workers, a cluster each, take whole segments; -1: none
  int whole_workers;        // clusters, at most those of the grid
  uint32_t whole_share;     // ceil(2^32 / whole_workers), 0 for one
  int lanes;                // K: workers come in groups, one for each KV head of the same keys, and the map numbers groups; 1: no groups
  bool even;                // fewer workers where that leaves equal segments uncut
  uint32_t per_group;       // ceil(2^32 / G), 0 for one
  int row_tiles;            // 8-row tiles of query rows that a CTA holds: 1 or 2
  int chunk_shift;          // log2 of 8 row_tiles: pieces into which the rows of a KV head are cut
  int ctas;                 // to an SM: 1 or 2
  bool stream;              // each warp is a worker
};

// Fills stamp, workspace_bytes and workers ... chunks from the rest, which names no device data, so a captured graph stays right. Call it
// for each launch: the stamp is of one.
void plan_decode_attention(DecodeAttentionParams& p);

// Rows of sequences with more than max_q rows are not written, rows without keys and (unless leave_padding) rows past q_starts[B] are.
void decode_attention(const DecodeAttentionParams& p, cudaStream_t stream);

// Its parts for caches of one byte, units of their own.
void decode_attention_fp8(const DecodeAttentionParams& p, cudaStream_t stream);
void decode_attention_s8(const DecodeAttentionParams& p, cudaStream_t stream);

}  // namespace pyllm
