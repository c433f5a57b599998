#include "fused/qk_norm_rope_append.cuh"

#include "common/dispatch.h"
#include "fused/rope_halves.cuh"

namespace pyllm {

void qk_norm_rope_append(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("qk_norm_rope_append: qkv", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dispatch_bool(p.fp8_cache, [&](auto fp8) {
      constexpr bool kFp8 = decltype(fp8)::value;
      if (p.tokens == 0 || fused::launch_if_halves<T, kFp8>(p, stream)) return;
      fused::launch_qk_norm_rope_append<T, kFp8>(p, stream);
    });
  });
}

}  // namespace pyllm
