#include "fused/embed_tokens.cuh"

#include "common/dispatch.h"

namespace pyllm {

void embed_tokens(const EmbedTokensParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>(
      "embed_tokens: weight", p.dtype, [&](auto t) { fused::launch_embed_tokens<typename decltype(t)::type>(p, stream); });
}

}  // namespace pyllm
