// D = Dv = 64. Plain masks: three warpgroups, 192 rows, each in order. 527 to 572 TFLOP/s full at 16k tokens from run to run; beside the
// 572, 548 with blocks of 160 or 176 keys.
#include "attention/prefill_attention.cuh"
#include "attention/prefill_shapes.h"
#include "common/dispatch.h"

namespace pyllm::attention {

void prefill_64(const PrefillAttentionParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("prefill_attention: q", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if (is_plain(p)) {
      launch_prefill<PrefillShape<T, 64, 64, 192, 3, 2, 2, false, true, true>>(p, stream);
    } else {
      launch_prefill<PrefillShape<T, 64, 64, 128, 2, 2, 2, true, false, false>>(p, stream);
    }
  });
}

}  // namespace pyllm::attention
