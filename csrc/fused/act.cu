#include "fused/act.cuh"

#include "common/dispatch.h"

namespace pyllm {

void act(const ActParams& p, cudaStream_t stream) {
  using namespace fused;
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("act: x", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dispatch<kSilu, kGelu, kGeluTanh, kRelu2>("act: act", p.act, [&](auto kind) { launch_act<T, decltype(kind)::value>(p, stream); });
  });
}

}  // namespace pyllm
