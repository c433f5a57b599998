#include "sampling/sample_tokens.cuh"

#include "common/dispatch.h"
#include "sampling/launch_shape.h"

namespace pyllm {

void sample_tokens(const SampleTokensParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("sample_tokens: logits", p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int64_t kWork = sizeof(sampling::SampleWork<T, 256>);
    const auto spread = sampling::spread_row(p.rows, p.vocab, sizeof(T), kWork);
    dispatch<256, 512>("sample_tokens: threads", spread.threads, [&](auto threads) {
      static_assert(sizeof(sampling::SampleWork<T, threads()>) == kWork && kWork % 16 == 0);
      launch("sample_tokens", sampling::shape_of(spread, p.rows, sizeof(T), kWork), stream, sampling::sample_tokens_kernel<T, threads()>, p,
             spread.slice, spread.held);
    });
  });
}

}  // namespace pyllm
