#include "norm/quantize_fp8.h"

#include "norm/quantize_fp8.cuh"

namespace pyllm {

void quantize_fp8(const QuantizeParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("quantize_fp8: x", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    const auto [shape, threads] = norm::choose_threads(p.n / norm::kVec<T>);
    switch (shape) {
      case norm::Shape::kTwo:
        return norm::run_quantize<T, 2>(p, threads, stream);
      case norm::Shape::kFour:
        return norm::run_quantize<T, 4>(p, threads, stream);
      case norm::Shape::kEight:
        if constexpr (sizeof(T) == 4) return norm::run_quantize<T, 8>(p, threads, stream);
    }
  });
}

}  // namespace pyllm
