#include "fused/softcap.cuh"

#include "common/dispatch.h"

namespace pyllm {

void softcap(const SoftcapParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("softcap: x", p.dtype,
                                                           [&](auto t) { fused::launch_softcap<typename decltype(t)::type>(p, stream); });
}

}  // namespace pyllm
