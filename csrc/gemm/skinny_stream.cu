#include "gemm/skinny_stream_launch.cuh"

namespace pyllm {

bool skinny_stream_fp8(const SkinnyLinearParams& p, int sms, cudaStream_t stream);   // skinny_stream_fp8.cu
bool skinny_stream_fp16(const SkinnyLinearParams& p, int sms, cudaStream_t stream);  // skinny_stream_fp16.cu
bool skinny_stream_wide(const SkinnyLinearParams& p, int sms, cudaStream_t stream);  // skinny_stream_wide.cu

namespace {

// Whether the wide stream goes first: from nine rows on, of e4m3 from three on against weights of this size (four rows, one H200, us:
// 6144 x 4096 7.6 and 8.3; 2048 x 8192 6.7 and 6.4, 4096 x 14336 15.0 and 15.2, 7168 x 8192 15.2 and 14.8).
constexpr int64_t kWideLeast = 1 << 24, kWideMost = 26'000'000;

bool wide(const SkinnyLinearParams& p) {
  return p.m > 8 || (p.dtype == DType::kE4M3 && p.m >= 3 && p.n * p.k > kWideLeast && p.n * p.k <= kWideMost);
}

bool narrow(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
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

}  // namespace

bool skinny_stream(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  if (p.m > gemm::kStreamRows || p.k >= kStreamLongest) return false;
  if (wide(p)) return skinny_stream_wide(p, sms, stream) || narrow(p, sms, stream);
  return narrow(p, sms, stream) || skinny_stream_wide(p, sms, stream);
}

}  // namespace pyllm
