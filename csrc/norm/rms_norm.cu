#include "norm/rms_norm.h"

#include "norm/rms_norm.cuh"

namespace pyllm {

void rms_norm(const NormParams& p, cudaStream_t stream) { norm::run_norm<norm::NormOp::kRms, norm::RmsFormula>("rms_norm", p, stream); }

}  // namespace pyllm
