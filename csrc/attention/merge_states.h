#pragma once
#include "common/params.h"

namespace pyllm {

// T rows of H heads, each with D values and the logarithm of the sum that they were divided by.
struct MergeStatesParams {
  const void* o[2];         // [T, H, D] dtype, dense in D, 16-byte aligned rows
  int64_t token_stride[2];  // elements
  int64_t head_stride[2];   // elements
  const float* lse[2];      // [T, H] contiguous, natural log
  void* out;                // [T, H, D] dtype, contiguous
  float* out_lse;           // [T, H]
  int64_t tokens;           // T
  int heads;                // H
  int dim;                  // D, a multiple of 16 bytes
  DType dtype;              // kBF16, kFP16 or kFP32
};

void merge_states(const MergeStatesParams& p, cudaStream_t stream);

}  // namespace pyllm
