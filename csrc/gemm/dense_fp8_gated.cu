#include "gemm/dense_fp8.h"

#include "gemm/dense_launch.cuh"

namespace pyllm {

void dense_fp8_gated(const DenseParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("dense_fp8: result", p.out_dtype, [&](auto t) {
    using Out = typename decltype(t)::type;
    dispatch<fused::kSilu, fused::kGelu, fused::kGeluTanh, fused::kRelu2>("act", p.epilogue.act, [&](auto act) {
      dense::FullTiles<__nv_fp8_e4m3, Out, dense::Full<decltype(act)::value, true>>::run(p, 1, stream);
    });
  });
}

}  // namespace pyllm
