#include "attention/merge_states.cuh"

#include "common/dispatch.h"

namespace pyllm {

void merge_states(const MergeStatesParams& p, cudaStream_t stream) {
  using attention::kMergeThreads;
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("merge_states: o_a", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const int64_t rows = kMergeThreads / (p.dim / (16 / static_cast<int>(sizeof(T))));
    const int64_t ctas = (p.tokens * p.heads + rows - 1) / rows;
    launch("merge_states", {static_cast<unsigned>(ctas), kMergeThreads}, stream, attention::merge_states_kernel<T>, p);
  });
}

}  // namespace pyllm
