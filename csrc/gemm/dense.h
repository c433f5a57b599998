// Parameters of the dense GEMM kernels (many rows).
#pragma once
#include <cstdint>

#include "common/params.h"

namespace pyllm {

struct DenseShape {
  int m, n, k;
  int raster;  // tiles along M of one group of the walk
};

// y = sum * row_scale[m * row_scale_step] * column_scale[n * column_scale_step] + bias[n]; a null pointer leaves its factor or term out.
struct DenseEpilogue {
  const float* row_scale;
  const float* column_scale;
  const void* bias;      // [N] of the dtype of y
  int row_scale_step;    // 1: one per row, 0: one for all
  int column_scale_step;
};

}  // namespace pyllm
