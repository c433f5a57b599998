// D = Dv = 64. Plain masks: three warpgroups, 192 rows, each in order, in turns, with a third stage so that nobody has a turn and waits for
// keys: 561 TFLOP/s full at 16k tokens; 522 without turns in blocks of 192 keys, which spill, and 498 with them.
#include "attention/prefill_attention.cuh"
#include "attention/prefill_shapes.h"
#include "common/dispatch.h"

namespace pyllm::attention {

void prefill_64(const PrefillAttentionParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("prefill_attention: q", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if (is_plain(p)) {
      launch_prefill<PrefillShape<T, 64, 64, 160, 3, 3, 2, true, true, true>>(p, stream);
    } else {
      launch_prefill<PrefillShape<T, 64, 64, 128, 2, 2, 2, true, false, false>>(p, stream);
    }
  });
}

}  // namespace pyllm::attention
