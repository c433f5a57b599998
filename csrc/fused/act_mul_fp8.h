// act_mul_fp8: y = round(f(gate) * up) of x's dtype, then e4m3 of y with a scale per row, or with a given one.
#pragma once
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace pyllm {

struct ActMulFp8Params {
  const void* x;                 // [T, 2F] of dtype, row stride x_stride, rows at multiples of 16 bytes
  int64_t x_stride;              // elements
  uint8_t* out;                  // [T, F] e4m3, contiguous
  float* scale_out;              // [T], the dequantisation scale of each row; not written with a given one
  int64_t rows;                  // T, less than 2^28
  int n;                         // F, a multiple of 8, 8 .. 32768
  DType dtype;                   // bf16, fp16, fp32
  int act;                       // fused::Activation
  const float* scale = nullptr;  // [1]: the given one
};

void act_mul_fp8(const ActMulFp8Params& p, cudaStream_t stream);

}  // namespace pyllm
