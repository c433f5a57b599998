#include "attention/decode_launch.cuh"

namespace pyllm {

void decode_attention(const DecodeAttentionParams& p, cudaStream_t stream) {
  switch (p.cache) {
    case DecodeCache::kE4M3:
      return decode_attention_fp8(p, stream);
    case DecodeCache::kS8:
      return decode_attention_s8(p, stream);
    case DecodeCache::kLikeQ:
      return dispatch_dtype<DType::kBF16, DType::kFP16>(
          "decode_attention: q", p.dtype, [&](auto t) { attention::launch_decode_dims<typename decltype(t)::type>(p, stream); });
  }
}

}  // namespace pyllm
