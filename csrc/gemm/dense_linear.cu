#include "gemm/dense_launch.cuh"

namespace pyllm {

void dense_fp16(const DenseParams& p, cudaStream_t stream);  // dense_fp16.cu
void dense_few(const DenseParams& p, cudaStream_t stream);   // dense_few.cu

void dense_linear(const DenseParams& p, cudaStream_t stream) {
  if (p.m <= dense::kFewRows && dense::is_plain(p)) return dense_few(p, stream);
  if (p.dtype == DType::kFP16) return dense_fp16(p, stream);
  if (p.dtype != DType::kBF16) throw std::runtime_error("dense_linear: x is neither bfloat16 nor float16");
  dense::run_dense<__nv_bfloat16, __nv_bfloat16>(p, stream);
}

}  // namespace pyllm
