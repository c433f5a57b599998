#include "sampling/token_logprobs.cuh"

#include "common/dispatch.h"
#include "sampling/launch_shape.h"

namespace pyllm {

void token_logprobs(const TokenLogprobsParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("token_logprobs: logits", p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int64_t kWork = sizeof(sampling::LogprobsWork<T, sampling::kRowThreads>);
    static_assert(kWork % 16 == 0);
    const auto spread = sampling::spread_row(p.rows, p.vocab, sizeof(T), kWork, sizeof(T) == 4);
    launch("token_logprobs", sampling::shape_of(spread, p.rows, sizeof(T), kWork), stream,
           sampling::token_logprobs_kernel<T, sampling::kRowThreads>, p, spread.slice, spread.held);
  });
}

}  // namespace pyllm
