// The instantiations of decode_step, by the weights' dtype: a unit each.
#pragma once
#include <cuda_runtime_api.h>

namespace pyllm::step {

struct Args;
void run_bf16(Args& a, int ctas, cudaStream_t stream);
void run_fp8(Args& a, int ctas, cudaStream_t stream);

}  // namespace pyllm::step
