#include "attention/paged_attention.cuh"

#include "common/dispatch.h"

namespace pyllm {
namespace {

// Whether prefill goes first: where its tiles leave SMs idle, as many as the host can tell, and decode has work for all of them. (With few
// segments decode wants clusters, for which it had to wait.) An e4m3 cache has smaller tiles, which leave none.
int leading_rows(const PagedAttentionParams& p) {
  const PrefillAttentionParams& f = p.prefill;
  const int64_t rows = f.tokens - f.batch + 1;  // of the one prompt, if all other sequences are decodes
  if (!p.decodes || p.q_fp8 != nullptr || p.decode.cluster_shift > 0 || rows <= f.skip_rows) return 0;
  const int64_t tile = f.dim <= 128 && f.window == 0 && f.softcap == 0.f ? 192 : 128;
  int device = 0, sms = 0;
  check_launch(cudaGetDevice(&device), "paged_attention");
  check_launch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "paged_attention");
  return 4 * ((rows + tile - 1) / tile * f.heads) <= 3 * sms ? static_cast<int>(rows) : 0;
}

}  // namespace

void paged_attention(const PagedAttentionParams& p, cudaStream_t stream) {
  using namespace attention;
  if (p.q_fp8 != nullptr) {
    dispatch_dtype<DType::kBF16, DType::kFP16>("paged_attention: q", p.q_dtype, [&](auto t) {
      using T = typename decltype(t)::type;
      dispatch<64, 128, 256>("paged_attention: D", p.prefill.dim, [&](auto d) {
        const int64_t rows = p.prefill.tokens * p.prefill.heads, each = kQuantThreads / (d() / 8);
        const LaunchShape shape{.grid = dim3(static_cast<unsigned>((rows + each - 1) / each)), .block = dim3(kQuantThreads)};
        launch("paged_attention", shape, stream, quantize_rows_kernel<T, d()>, p);
      });
    });
  }
  if (const int rows = leading_rows(p); rows > 0) {
    PagedAttentionParams step = p;
    step.prefill.beside = false;
    step.prefill.leading_rows = rows;
    step.decode.beside = true;
    prefill_attention(step.prefill, stream);
    return decode_attention(step.decode, stream);
  }
  // Decode ahead of prefill: its CTAs go one by one, and prefill takes each SM as it becomes free.
  if (p.decodes) decode_attention(p.decode, stream);
  prefill_attention(p.prefill, stream);
}

}  // namespace pyllm
