#pragma once
#include "common/params.h"

namespace pyllm {

struct SampleTokensParams {
  const void* logits;        // [B, V], dtype below, rows at row_stride
  int64_t row_stride;        // elements
  int64_t rows;              // B
  int64_t vocab;             // V, 1 ... 2^20
  DType dtype;               // bf16, fp16 or fp32
  const float* temperature;  // [B], or null: greedy; then all below are null
  const int32_t* top_k;      // [B] or null
  const float* top_p;        // [B] or null
  const float* min_p;        // [B] or null
  const int64_t* seed;       // [B]
  const int32_t* index;      // [B]
  const int32_t* position;   // [B]
  int32_t* tokens;           // [B] out
};

void sample_tokens(const SampleTokensParams& p, cudaStream_t stream);

}  // namespace pyllm
