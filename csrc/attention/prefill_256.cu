// D = Dv = 256. Plain masks in a shape of their own: 709 TFLOP/s full at 8k tokens; in that run 698 in turns, 670 where each block asks
// which masks there are.
#include "attention/prefill_attention.cuh"
#include "attention/prefill_shapes.h"
#include "common/dispatch.h"

namespace pyllm::attention {

void prefill_256(const PrefillAttentionParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("prefill_attention: q", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if (is_plain(p)) {
      launch_prefill<PrefillShape<T, 256, 256, 80, 2, 2, 1, false, false, true>>(p, stream);
    } else {
      launch_prefill<PrefillShape<T, 256, 256, 80, 2, 2, 1, true, false, false>>(p, stream);
    }
  });
}

}  // namespace pyllm::attention
