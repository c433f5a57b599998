#include "attention/decode_launch.cuh"

namespace pyllm {

void decode_attention_fp8(const DecodeAttentionParams& p, cudaStream_t stream) { attention::launch_decode_dims<__nv_fp8_e4m3>(p, stream); }

}  // namespace pyllm
