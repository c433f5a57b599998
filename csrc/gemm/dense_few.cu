#include "gemm/dense_launch.cuh"

namespace pyllm {

void dense_few(const DenseParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("dense_linear: x", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dense::FewRowsTiles<T, T>::run(p, sizeof(T), stream);
  });
}

}  // namespace pyllm
