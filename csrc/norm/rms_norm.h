#pragma once
#include "norm/norm_row.h"

namespace pyllm {

void rms_norm(const NormParams& p, cudaStream_t stream);

}  // namespace pyllm
