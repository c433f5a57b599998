#include "gemm/skinny_stream_launch.cuh"

namespace pyllm {

bool skinny_stream_fp8(const SkinnyLinearParams& p, int sms, cudaStream_t stream);   // skinny_stream_fp8.cu
bool skinny_stream_fp16(const SkinnyLinearParams& p, int sms, cudaStream_t stream);  // skinny_stream_fp16.cu

bool skinny_stream(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  if (p.m > gemm::kStreamRows || p.k >= kStreamLongest) return false;
  if (p.dtype == DType::kE4M3) return skinny_stream_fp8(p, sms, stream);
  if (p.dtype == DType::kFP16) return skinny_stream_fp16(p, sms, stream);
  if (p.m > 8) {
    if (p.gated || p.norm_weight != nullptr) return false;
    return gemm::run_stream<__nv_bfloat16, __nv_bfloat16, 2, true, false, false>(p, sms, stream);
  }
  bool served = false;
  dispatch_bool(p.gated, [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value;
    if (p.norm_weight != nullptr) {
      served = gemm::run_stream<__nv_bfloat16, __nv_bfloat16, 1, true, kGated, true>(p, sms, stream);
    } else {
      served = gemm::run_stream<__nv_bfloat16, __nv_bfloat16, 1, true, kGated, false>(p, sms, stream);
    }
  });
  return served;
}

}  // namespace pyllm
