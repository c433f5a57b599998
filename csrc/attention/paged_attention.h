#pragma once
#include "attention/decode_attention.h"
#include "attention/prefill_attention.h"

namespace pyllm {

// One ragged step over a paged cache. Sequences of at most decode.max_q rows belong to the decode kernel, all others to the prefill kernel;
// both write the same out and lse, and between them every row: which sequence is whose is found on the device.
struct PagedAttentionParams {
  DecodeAttentionParams decode;    // leave_padding set, planned; not used if !decodes
  PrefillAttentionParams prefill;  // as of the cache's dtype: for e4m3 q and q_scale are those below
  bool decodes;                    // the step is causal: prefill.skip_rows is decode.max_q and prefill.beside set; else 0 and not set
  const void* q;                   // e4m3 cache: [T, H, D] q_dtype, to be quantized; else null
  int64_t q_token_stride;          // elements
  int64_t q_head_stride;           // elements
  uint8_t* q_fp8;                  // [T, H, D] e4m3, contiguous
  float* q_scale;                  // [T, H]
  DType q_dtype;                   // kBF16 or kFP16
};

void paged_attention(const PagedAttentionParams& p, cudaStream_t stream);

}  // namespace pyllm
