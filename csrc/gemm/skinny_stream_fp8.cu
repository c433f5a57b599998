#include "gemm/skinny_stream_launch.cuh"

namespace pyllm {

bool skinny_stream_fp8(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  if (p.m > 8) {
    if (p.gated || p.out_dtype == DType::kFP16) return false;
    return gemm::run_stream<__nv_fp8_e4m3, __nv_bfloat16, 2, true, false, false>(p, sms, stream);
  }
  bool served = false;
  dispatch_bool(p.gated, [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value;
    if (p.out_dtype == DType::kFP16) {
      served = gemm::run_stream<__nv_fp8_e4m3, __half, 1, false, kGated, false>(p, sms, stream);
    } else {
      served = gemm::run_stream<__nv_fp8_e4m3, __nv_bfloat16, 1, true, kGated, false>(p, sms, stream);
    }
  });
  return served;
}

}  // namespace pyllm
