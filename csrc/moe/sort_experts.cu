#include "moe/sort_experts.h"

#include <algorithm>

#include "moe/sort_experts.cuh"

namespace pyllm {

void sort_experts(const SortParams& p, cudaStream_t stream) {
  // A warp takes 32 pairs at a time: four times, then more warps do, then more CTAs.
  const int64_t steps = (p.pairs + 31) / 32;
  int ctas = 1;
  while (ctas < 8 && steps > static_cast<int64_t>(ctas) * moe::kSortWarps * moe::kAhead) ctas *= 2;
  const int warps = static_cast<int>(std::min<int64_t>(moe::kSortWarps, (steps + ctas * moe::kAhead - 1) / (ctas * moe::kAhead)));
  const int piece = static_cast<int>((steps + ctas * warps - 1) / (ctas * warps) * 32);
  const size_t smem = static_cast<size_t>(warps + 2) * p.experts * sizeof(int);
  launch("moe_experts: sort", {dim3(ctas), dim3(moe::kSortThreads), smem, ctas}, stream, moe::sort_kernel, p, warps, piece);
}

}  // namespace pyllm
