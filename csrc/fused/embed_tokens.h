// embed_tokens: out[t] = round(weight[ids[t] - first] * scale), zeros for rows this table does not hold.
#pragma once
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace pyllm {

struct EmbedTokensParams {
  const int32_t* ids;     // [T]
  const void* weight;     // [V, N] of dtype, row stride weight_stride, rows at multiples of 16 bytes; a constant
  void* out;              // [T, N] of dtype, contiguous
  int64_t tokens;         // T
  int64_t vocab;          // V
  int64_t width;          // N, a multiple of 8
  int64_t weight_stride;  // elements
  int64_t first;          // id of the first row of weight
  float scale;
  DType dtype;  // bf16, fp16, fp32
};

void embed_tokens(const EmbedTokensParams& p, cudaStream_t stream);

}  // namespace pyllm
