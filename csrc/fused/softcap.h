// softcap: out = round(cap * tanh(x / cap)), element-wise.
#pragma once
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace pyllm {

struct SoftcapParams {
  const void* x;     // [T, V] of dtype, row stride x_stride, rows at any element
  void* out;         // [T, V] of dtype, contiguous, at a multiple of 16 bytes
  int64_t tokens;    // T
  int64_t width;     // V, 1 to 2^27
  int64_t x_stride;  // elements
  float cap;         // > 0
  DType dtype;       // bf16, fp16, fp32
};

void softcap(const SoftcapParams& p, cudaStream_t stream);

}  // namespace pyllm
