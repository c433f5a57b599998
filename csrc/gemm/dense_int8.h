// The dense GEMM of int8 operands; DenseParams has the fields (dtype is not used).
#pragma once
#include "gemm/dense_linear.h"

namespace pyllm {

void dense_int8(const DenseParams& p, cudaStream_t stream);

}  // namespace pyllm
