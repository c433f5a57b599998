#pragma once
#include "common/params.h"

namespace pyllm {

struct TokenLogprobsParams {
  const void* logits;     // [B, V], dtype below, rows at row_stride
  int64_t row_stride;     // elements
  int64_t rows;           // B
  int64_t vocab;          // V, 1 ... 2^20
  DType dtype;            // bf16, fp16 or fp32
  const int32_t* tokens;  // [B]
  int64_t top_n;          // 0 ... 20
  float* logprob;         // [B] out
  int32_t* rank;          // [B] out
  float* top_logprobs;    // [B, top_n] out
  int32_t* top_tokens;    // [B, top_n] out
};

void token_logprobs(const TokenLogprobsParams& p, cudaStream_t stream);

}  // namespace pyllm
