#include "attention/decode_launch.cuh"

namespace pyllm {

void decode_attention_s8(const DecodeAttentionParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("decode_attention: q", p.dtype,
                                             [&](auto t) { attention::launch_decode_dims<typename decltype(t)::type, int8_t>(p, stream); });
}

}  // namespace pyllm
