#include "gemm/skinny_stream_launch.cuh"

namespace pyllm {

bool skinny_stream_fp8(const SkinnyLinearParams& p, int sms, cudaStream_t stream);   // skinny_stream_fp8.cu
bool skinny_stream_fp16(const SkinnyLinearParams& p, int sms, cudaStream_t stream);  // skinny_stream_fp16.cu
bool skinny_stream_wide(const SkinnyLinearParams& p, int sms, cudaStream_t stream);  // skinny_stream_wide.cu

namespace {

// Whether the wide stream goes first: from nine rows on; of e4m3 from three on where it is the faster one. One H200, us, four and eight
// rows, in brackets the other: 4096 x 4096 5.8 and 5.9 (5.9 and 6.3), 6144 x 4096 7.8 and 7.8 (8.3 and 8.3), 16384 x 2048 8.8 and 9.2 (9.1
// and 9.4); of long rows 4096 x 14336 14.6 and 14.8 (14.9 and 16.3); of short ones 8192 x 1024 3.9 and 3.7 (4.0 and 4.3). But 1280 x 8192
// 5.5 and 5.4 (4.4 and 4.7), 7168 x 8192 14.9 and 14.9 (14.7 and 15.1), 28672 x 4096 27.5 and 27.7 (27.3 and 28.4). Three to eight rows are
// treated alike, so that a row has the same bits among them.
constexpr int64_t kWideLeast = 1 << 24, kWideMost = 34'000'000;  // weights
constexpr int64_t kWideLongRow = 12288, kWideShortRow = 2048, kWideShortRows = 48;

bool wide(const SkinnyLinearParams& p, int sms) {
  if (p.m > 8) return true;
  if (p.dtype != DType::kE4M3 || p.m < 3) return false;
  const int64_t size = p.n * p.k;
  if (size < kWideLeast) return p.k <= kWideShortRow && p.n >= kWideShortRows * sms;
  return size <= kWideMost || p.k >= kWideLongRow;
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
  if (wide(p, sms)) return skinny_stream_wide(p, sms, stream) || narrow(p, sms, stream);
  return narrow(p, sms, stream) || skinny_stream_wide(p, sms, stream);
}

}  // namespace pyllm
