// The dense GEMM of e4m3 operands; DenseParams has the fields.
#pragma once
#include "gemm/dense_linear.h"

namespace pyllm {

void dense_fp8(const DenseParams& p, cudaStream_t stream);

}  // namespace pyllm
