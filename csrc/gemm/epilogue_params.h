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
};

}  // namespace pyllm::gemm
