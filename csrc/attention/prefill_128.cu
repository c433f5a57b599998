// D = Dv = 128. Plain masks: three warpgroups, 192 rows, each in order: 782 TFLOP/s full at 8k tokens. Two of them, with the same bits,
// where the tiles of 128 rows find an SM each: a prompt of 512 tokens takes 17.4 instead of 18.3 us, behind 1k keys 31.2 instead of 35.9.
#include "attention/prefill_attention.cuh"
#include "attention/prefill_shapes.h"
#include "common/dispatch.h"

namespace pyllm::attention {

void prefill_128(const PrefillAttentionParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("prefill_attention: q", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if (is_plain(p) && p.all_ctas == 0 && (prompt_rows(p) + 127) / 128 * p.heads <= prefill_sms()) {
      launch_prefill<PrefillShape<T, 128, 128, 128, 2, 2, 2, false, true, true>>(p, stream);
    } else if (is_plain(p)) {
      launch_prefill<PrefillShape<T, 128, 128, 128, 3, 2, 2, false, true, true>>(p, stream);
    } else {
      launch_prefill<PrefillShape<T, 128, 128, 128, 2, 2, 2, true, false, false>>(p, stream);
    }
  });
}

}  // namespace pyllm::attention
