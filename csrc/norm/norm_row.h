// Parameters of rms_norm and layer_norm.
#pragma once
#include <cstdint>

#include "common/params.h"

namespace pyllm {

enum class NormQuant : int { kNone = 0, kToken = 1, kStatic = 2 };

struct NormParams {
  const void* x;  // [rows, n] dtype, rows x_stride elements apart, 16-byte aligned
  int64_t x_stride;
  const void* weight;  // [n] weight_dtype, dense, 16-byte aligned
  const void* bias;    // [n] weight_dtype or null; layer_norm alone
  void* residual;      // [rows, n] dtype, rows residual_stride elements apart, updated in place; or null
  int64_t residual_stride;
  void* out;           // [rows, n] dense: dtype, or e4m3 when quant is not kNone
  const float* scale;  // [1] quant == kStatic: the dequantisation scale
  float* scale_out;    // [rows] quant == kToken: the dequantisation scale of each row
  int64_t rows;
  int n;  // a multiple of 8, 8 .. 32768
  float eps;
  DType dtype;         // bf16, fp16 or fp32
  DType weight_dtype;  // dtype or fp32
  NormQuant quant;
};

}  // namespace pyllm
