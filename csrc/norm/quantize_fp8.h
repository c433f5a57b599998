// Parameters of quantize_fp8.
#pragma once
#include <cstdint>

#include "common/params.h"

namespace pyllm {

enum class QuantMode : int { kToken = 1, kStatic = 2, kTensor = 3, kGroup = 4 };

inline constexpr int kQuantGroup = 128;         // columns that share a scale in mode group
inline constexpr int kMaxQuantPartials = 2048;  // CTAs of the first pass of mode tensor: each leaves one maximum

struct QuantizeParams {
  const void* x;  // [rows, n] dtype, rows x_stride elements apart, 16-byte aligned
  int64_t x_stride;
  uint8_t* out;        // [rows, n] e4m3, dense
  const float* scale;  // [1] mode static: the dequantisation scale
  float* scale_out;    // dequantisation scales: [rows] token, [1] static (a copy) and tensor, [rows, ceil(n / 128)] group
  float* partials;     // [kMaxQuantPartials] mode tensor: scratch, needs no initial value
  int64_t rows;
  int n;        // a multiple of 8, 8 .. 32768
  DType dtype;  // bf16, fp16 or fp32
  QuantMode mode;
};

void quantize_fp8(const QuantizeParams& p, cudaStream_t stream);

}  // namespace pyllm
