#include "fused/act_mul_fp8.cuh"

#include "common/dispatch.h"

namespace pyllm {

void act_mul_fp8(const ActMulFp8Params& p, cudaStream_t stream) {
  using namespace fused;
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("act_mul_fp8: x", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dispatch<kSilu, kGelu, kGeluTanh, kRelu2>("act_mul_fp8: act", p.act,
                                              [&](auto kind) { launch_act_mul_fp8<T, decltype(kind)::value>(p, stream); });
  });
}

}  // namespace pyllm
