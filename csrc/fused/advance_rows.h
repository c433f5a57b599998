// advance_rows: request rows take their sampled tokens and go one position further.
#pragma once
#include <cuda_runtime_api.h>

#include "common/params.h"

namespace pyllm {

struct AdvanceRowsParams {
  const int32_t* sampled;  // [n]
  const int32_t* active;   // [n], 1 or 0
  const int32_t* table;    // [n, width] pages, rows table_stride apart
  int64_t table_stride;
  int32_t* token;     // [n]
  int32_t* position;  // [n]
  int32_t* kv_len;    // [n]
  int32_t* slots;     // [n]
  int n, width, page;
};

void advance_rows(const AdvanceRowsParams& p, cudaStream_t stream);

}  // namespace pyllm
