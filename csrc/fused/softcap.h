// softcap: out = round(cap * tanh(x / cap)), element-wise.
#pragma once
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace pyllm {

struct SoftcapParams {
  const void* x;     // [T, V] of dtype, row stride x_stride, rows at multiples of 16 bytes
  void* out;         // [T, V] of dtype, contiguous
  int64_t tokens;    // T
  int64_t width;     // V, a multiple of 8
  int64_t x_stride;  // elements
  float cap;         // > 0
  DType dtype;       // bf16, fp16, fp32
};

void softcap(const SoftcapParams& p, cudaStream_t stream);

}  // namespace pyllm
