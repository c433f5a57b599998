#include "attention/decode_launch.cuh"

namespace pyllm {

void decode_attention_s8(const DecodeAttentionParams& p, cudaStream_t stream) { attention::launch_decode_dims<int8_t>(p, stream); }

}  // namespace pyllm
