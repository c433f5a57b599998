#pragma once
#include "attention/prefill_attention.h"

namespace pyllm::attention {

// One translation unit for each (D, Dv), so that a build uses all cores; bf16 and fp16 in each.
void prefill_64(const PrefillAttentionParams& p, cudaStream_t stream);
void prefill_96(const PrefillAttentionParams& p, cudaStream_t stream);
void prefill_128(const PrefillAttentionParams& p, cudaStream_t stream);
void prefill_192(const PrefillAttentionParams& p, cudaStream_t stream);
void prefill_192_128(const PrefillAttentionParams& p, cudaStream_t stream);
void prefill_256(const PrefillAttentionParams& p, cudaStream_t stream);

}  // namespace pyllm::attention
