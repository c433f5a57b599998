#include "fused/qk_norm_rope_append.cuh"

#include "common/dispatch.h"
#include "fused/rope_halves.cuh"

namespace pyllm {

void qk_norm_rope_append(const QkNormRopeAppendParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("qk_norm_rope_append: qkv", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dispatch_bool(p.cache != KvCache::kLikeQkv, [&](auto byte) {
      constexpr bool kByte = decltype(byte)::value;
      if (p.tokens == 0 || fused::launch_if_halves<T, kByte>(p, stream)) return;
      fused::launch_qk_norm_rope_append<T, kByte>(p, stream);
    });
  });
}

}  // namespace pyllm
