#include "sampling/token_logprobs.cuh"

#include "common/dispatch.h"
#include "sampling/launch_shape.h"

namespace pyllm {

void token_logprobs(const TokenLogprobsParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("token_logprobs: logits", p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int64_t kWork = sizeof(sampling::LogprobsWork<T, 256>);
    const auto spread = sampling::spread_row(p.rows, p.vocab, sizeof(T), kWork);
    dispatch<256, 512>("token_logprobs: threads", spread.threads, [&](auto threads) {
      static_assert(sizeof(sampling::LogprobsWork<T, threads()>) == kWork && kWork % 16 == 0);
      launch("token_logprobs", sampling::shape_of(spread, p.rows, sizeof(T), kWork), stream, sampling::token_logprobs_kernel<T, threads()>,
             p, spread.slice, spread.held);
    });
  });
}

}  // namespace pyllm
