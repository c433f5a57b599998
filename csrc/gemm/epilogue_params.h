// What every GEMM's epilogue is told; epilogue.cuh has the formula. No device code: bind.cpp fills it in.
#pragma once
#include <cstdint>

namespace pyllm::gemm {

constexpr int kNoActivation = -1;

struct EpilogueParams {
  const float* row_scale = nullptr;     // [M], or one value with step 0
  const float* column_scale = nullptr;  // [N], or one value with step 0
  const void* bias = nullptr;           // [N] of the output's dtype
  const void* residual = nullptr;       // [M, columns] of the output's dtype
  int64_t residual_stride = 0;          // elements
  int row_scale_step = 0;
  int column_scale_step = 0;
  int act = kNoActivation;  // fused::Activation
  float softcap = 0.f;      // 0: none
  // The dense GEMM alone:
  const float* out_scale = nullptr;  // [1]: the result is e4m3(y / scale); the bias is bf16, or
  bool bias_fp16 = false;            // fp16
  float* squares = nullptr;          // [M, ceil(N / 128)]: written, the sum of the result's squares over each 128 columns
  const float* x_squares = nullptr;  // [M, x_squares_count]: the same of x; a row's factor is rsqrt(their sum / K + eps)
  int x_squares_count = 0;
  float eps = 0.f;
};

}  // namespace pyllm::gemm
