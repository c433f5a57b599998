#include "gemm/dense_fp8.h"

#include "gemm/dense_launch.cuh"

namespace pyllm {

void dense_fp8_blocks(const DenseParams& p, cudaStream_t stream);  // dense_fp8_blocks.cu
void dense_fp8_few(const DenseParams& p, cudaStream_t stream);     // dense_fp8_few.cu
void dense_fp8_gated(const DenseParams& p, cudaStream_t stream);   // dense_fp8_gated.cu

void dense_fp8(const DenseParams& p, cudaStream_t stream) {
  if (p.x_blocks != nullptr) return dense_fp8_blocks(p, stream);
  if (p.gated) return dense_fp8_gated(p, stream);
  if (p.m <= dense::kFewRows && dense::is_plain(p)) return dense_fp8_few(p, stream);
  if (!dense::is_plain(p)) throw std::runtime_error("dense_fp8: activations without a gate, soft caps and residuals are not built");
  dispatch_dtype<DType::kBF16, DType::kFP16>("dense_fp8: result", p.out_dtype, [&](auto t) {
    using Out = typename decltype(t)::type;
    if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
      dense::PlainTiles<__nv_fp8_e4m3, Out>::run(p, 1, stream);
    } else {
      dense::FewTiles<__nv_fp8_e4m3, Out>::run(p, 1, stream);
    }
  });
}

}  // namespace pyllm
