#include "fused/qk_norm_rope_append.cuh"

#include "common/dispatch.h"

namespace pyllm {

void qk_norm_rope_append(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("qk_norm_rope_append: qkv", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dispatch_bool(p.fp8_cache, [&](auto fp8) { fused::launch_qk_norm_rope_append<T, decltype(fp8)::value>(p, stream); });
  });
}

}  // namespace pyllm
