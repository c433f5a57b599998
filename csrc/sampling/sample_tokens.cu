#include "sampling/sample_tokens.cuh"

#include "common/dispatch.h"
#include "sampling/launch_shape.h"

namespace pyllm {

void sample_tokens(const SampleTokensParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("sample_tokens: logits", p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int64_t kWork = sizeof(sampling::SampleWork<T, sampling::kRowThreads>);
    static_assert(kWork % 16 == 0);
    const bool rereads = p.temperature && !p.top_k && (p.top_p || sizeof(T) == 4);
    const auto spread = sampling::spread_row(p.rows, p.vocab, sizeof(T), kWork, rereads);
    launch("sample_tokens", sampling::shape_of(spread, p.rows, sizeof(T), kWork), stream,
           sampling::sample_tokens_kernel<T, sampling::kRowThreads>, p, spread.slice, spread.held);
  });
}

}  // namespace pyllm
