// act_mul: out = round(f(gate) * up), x = [gate | up].
#pragma once
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace pyllm {

struct ActMulParams {
  const void* x;     // [T, 2F] of dtype, row stride x_stride, rows at multiples of 16 bytes
  void* out;         // [T, F] of dtype, contiguous
  int64_t tokens;    // T
  int64_t width;     // F, a multiple of 8
  int64_t x_stride;  // elements
  DType dtype;       // bf16, fp16, fp32
  int act;           // fused::Activation
};

void act_mul(const ActMulParams& p, cudaStream_t stream);

}  // namespace pyllm
