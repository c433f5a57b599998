#include "norm/quantize_fp8.h"

#include "norm/quantize_fp8.cuh"

namespace pyllm {

void quantize_fp8(const QuantizeParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("quantize_fp8: x", p.dtype,
                                                           [&](auto t) { norm::run_quantize<typename decltype(t)::type>(p, stream); });
}

}  // namespace pyllm
