#include "gemm/grouped_launch.cuh"

namespace pyllm {

void grouped_fp8(const GroupedParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("grouped GEMM: result", p.out_dtype,
                                             [&](auto t) { grouped::run_grouped<__nv_fp8_e4m3, typename decltype(t)::type>(p, stream); });
}

}  // namespace pyllm
