#include "step/dispatch.h"
#include "step/launch.cuh"

namespace pyllm::step {

void run_bf16(Args& a, int ctas, cudaStream_t stream) {
  if (a.p.head_dim == 64) {
    a.p.fp8_cache ? run_step<false, 64, true>(a, ctas, stream) : run_step<false, 64, false>(a, ctas, stream);
  } else {
    a.p.fp8_cache ? run_step<false, 128, true>(a, ctas, stream) : run_step<false, 128, false>(a, ctas, stream);
  }
}

}  // namespace pyllm::step
