#include "gemm/dense_int8.h"

#include "gemm/dense_int8.cuh"

namespace pyllm {

void dense_int8(const DenseParams& p, cudaStream_t stream) {
  if (!dense::is_plain(p)) throw std::runtime_error("dense_int8: activations, gates, soft caps and residuals are not built");
  dispatch_dtype<DType::kBF16, DType::kFP16>("dense_int8: result", p.out_dtype, [&](auto t) {
    using Out = typename decltype(t)::type;
    dense::Int8Tiles<Out>::run(p, 1, stream);
  });
}

}  // namespace pyllm
