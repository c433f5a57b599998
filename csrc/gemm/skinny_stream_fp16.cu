#include "gemm/skinny_stream_launch.cuh"

namespace pyllm {

bool skinny_stream_fp16(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  if (p.m > 8) return !p.gated && gemm::run_stream<__half, __half, 2, true, false, false>(p, sms, stream);
  bool served = false;
  dispatch_bool(p.gated,
                [&](auto gated) { served = gemm::run_stream<__half, __half, 1, true, decltype(gated)::value, false>(p, sms, stream); });
  return served;
}

}  // namespace pyllm
