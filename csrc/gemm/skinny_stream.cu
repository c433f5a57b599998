#include "gemm/skinny_stream_launch.cuh"

namespace pyllm {

bool skinny_stream_fp8(const SkinnyLinearParams& p, int sms, cudaStream_t stream);  // skinny_stream_fp8.cu

bool skinny_stream(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  if (p.m > gemm::kStreamRows || p.k >= kStreamLongest) return false;
  if (p.dtype == DType::kE4M3) return skinny_stream_fp8(p, sms, stream);
  bool served = false;
  dispatch_bool(p.gated, [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value;
    if (p.norm_weight != nullptr) {
      served = gemm::run_stream<__nv_bfloat16, __nv_bfloat16, true, kGated, true>(p, sms, stream);
    } else if (p.dtype == DType::kFP16) {
      served = gemm::run_stream<__half, __half, false, kGated, false>(p, sms, stream);
    } else {
      served = gemm::run_stream<__nv_bfloat16, __nv_bfloat16, true, kGated, false>(p, sms, stream);
    }
  });
  return served;
}

}  // namespace pyllm
