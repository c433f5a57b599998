#include "gemm/grouped_linear.h"

#include "gemm/grouped_launch.cuh"

namespace pyllm {

void grouped_fp16(const GroupedParams& p, cudaStream_t stream);  // grouped_fp16.cu
void grouped_fp8(const GroupedParams& p, cudaStream_t stream);   // grouped_fp8.cu

void grouped_linear(const GroupedParams& p, cudaStream_t stream) {
  if (p.dtype == DType::kE4M3) return grouped_fp8(p, stream);
  if (p.dtype == DType::kFP16) return grouped_fp16(p, stream);
  grouped::run_grouped<__nv_bfloat16, __nv_bfloat16>(p, stream);
}

}  // namespace pyllm
