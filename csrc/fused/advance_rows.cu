#include "fused/advance_rows.cuh"

namespace pyllm {

void advance_rows(const AdvanceRowsParams& p, cudaStream_t stream) {
  const unsigned ctas = (p.n + fused::kAdvanceThreads - 1) / fused::kAdvanceThreads;
  launch("advance_rows", {.grid = dim3(ctas), .block = dim3(fused::kAdvanceThreads)}, stream, &fused::advance_rows_kernel, p);
}

}  // namespace pyllm
