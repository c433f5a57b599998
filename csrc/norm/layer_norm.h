#pragma once
#include "norm/norm_row.h"

namespace pyllm {

void layer_norm(const NormParams& p, cudaStream_t stream);

}  // namespace pyllm
