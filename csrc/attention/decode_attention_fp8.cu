#include "attention/decode_launch.cuh"

namespace pyllm {

void decode_attention_fp8(const DecodeAttentionParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>(
      "decode_attention: q", p.dtype, [&](auto t) { attention::launch_decode_dims<typename decltype(t)::type, __nv_fp8_e4m3>(p, stream); });
}

}  // namespace pyllm
