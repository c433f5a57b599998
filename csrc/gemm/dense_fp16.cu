#include "gemm/dense_launch.cuh"

namespace pyllm {

void dense_fp16(const DenseParams& p, cudaStream_t stream) { dense::run_dense<__half, __half>(p, stream); }

}  // namespace pyllm
