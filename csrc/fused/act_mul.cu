#include "fused/act_mul.cuh"

#include "common/dispatch.h"

namespace pyllm {

void act_mul(const ActMulParams& p, cudaStream_t stream) {
  using namespace fused;
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("act_mul: x", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dispatch<kSilu, kGelu, kGeluTanh, kRelu2>("act_mul: act", p.act,
                                              [&](auto kind) { launch_act_mul<T, decltype(kind)::value>(p, stream); });
  });
}

}  // namespace pyllm
