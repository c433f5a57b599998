// Parameters of the dense GEMMs (many rows): y = epilogue(x w^T), see epilogue.cuh for the epilogue.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/params.h"
#include "gemm/epilogue_params.h"

namespace pyllm {

struct DenseParams {
  const void* x;  // [M, K] of dtype (dense_int8: of int8); base and row stride multiples of 16 bytes
  const void* w;  // [N, K] of the same type and alignment; gated: N = 2F rows, gate first
  void* out;      // [M, N] (gated [M, F]) of out_dtype, contiguous; rows of a multiple of 16 bytes
  int64_t m;      // 1 .. 2^31 - 1, and so are n and k
  int64_t n;      // a multiple of 8; gated: of 16
  int64_t k;
  int64_t x_stride;  // elements
  int64_t w_stride;
  DType dtype;      // bf16, fp16, e4m3 (also stands for int8)
  DType out_dtype;  // bf16, fp16
  bool gated;
  gemm::EpilogueParams epilogue;
  // e4m3 with a scale for each 128 columns of a row of x and each 128 x 128 block of w, instead of the epilogue's scales.
  const float* x_blocks = nullptr;  // [M, ceil(K / 128)]
  const float* w_blocks = nullptr;  // [ceil(N / 128), ceil(K / 128)]
  int64_t x_blocks_stride = 0;      // elements
  int64_t w_blocks_stride = 0;
};

// bf16 and fp16.
void dense_linear(const DenseParams& p, cudaStream_t stream);

}  // namespace pyllm
