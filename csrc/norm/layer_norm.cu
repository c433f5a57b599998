#include "norm/layer_norm.h"

#include "norm/layer_norm.cuh"

namespace pyllm {

void layer_norm(const NormParams& p, cudaStream_t stream) {
  norm::run_norm<norm::NormOp::kLayer, norm::LayerFormula>("layer_norm", p, stream);
}

}  // namespace pyllm
