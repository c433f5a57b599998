#include "gemm/grouped_launch.cuh"

namespace pyllm {

void grouped_fp16(const GroupedParams& p, cudaStream_t stream) { grouped::run_grouped<__half, __half>(p, stream); }

}  // namespace pyllm
