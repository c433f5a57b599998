#include "attention/paged_attention.cuh"

#include "common/dispatch.h"

namespace pyllm {

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
  // Decode ahead of prefill: its CTAs go one by one, and prefill takes each SM as it becomes free.
  if (p.decodes) decode_attention(p.decode, stream);
  prefill_attention(p.prefill, stream);
}

}  // namespace pyllm
