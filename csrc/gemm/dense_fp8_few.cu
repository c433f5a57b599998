#include "gemm/dense_fp8.h"

#include "gemm/dense_launch.cuh"

namespace pyllm {

void dense_fp8_few(const DenseParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>(
      "dense_fp8: result", p.out_dtype, [&](auto t) { dense::FewRowsTiles<__nv_fp8_e4m3, typename decltype(t)::type>::run(p, 1, stream); });
}

}  // namespace pyllm
