// D = Dv = 128.
#include "attention/prefill_attention.cuh"
#include "attention/prefill_shapes.h"
#include "common/dispatch.h"

namespace pyllm::attention {

void prefill_128(const PrefillAttentionParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("prefill_attention: q", p.dtype, [&](auto t) {
    launch_prefill<PrefillShape<typename decltype(t)::type, 128, 128, 128, 2, 2, 2, true, false, false>>(p, stream);
  });
}

}  // namespace pyllm::attention
