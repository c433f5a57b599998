// The dense GEMM whose result is e4m3 with a given scale; DenseParams has the fields.
#pragma once
#include "gemm/dense_linear.h"

namespace pyllm {

// x in bf16 or e4m3, out_dtype e4m3, epilogue.out_scale set; no soft cap, no residual.
void dense_e4m3(const DenseParams& p, cudaStream_t stream);

}  // namespace pyllm
