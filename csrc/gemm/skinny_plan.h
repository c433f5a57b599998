// How the skinny GEMM cuts a weight [N, K] over the SMs. A function of N, K and the GPU alone: never of M.
//
// Rows are cut into blocks of block_rows (one wgmma of up to 64 rows), blocks are dealt to clusters of `split` CTAs, and the CTAs of a
// cluster take the units of K (128 or 256 bytes of a row) in turn. Where split > 1 a cluster has at most kTileBlocks blocks, so that its
// CTAs exchange partial sums once.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pyllm::gemm {

constexpr int kBlockRows = 64;
constexpr int kTileBlocks = 4;

struct SkinnyPlan {
  int split;        // CTAs of a cluster: 1, 2, 4
  int block_rows;   // a multiple of 8 (gated: 16), at most kBlockRows
  int blocks;       // of the whole matrix
  int per_cluster;  // blocks of one cluster; the last one may have fewer
  int clusters;
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `units` of K, `granule` 8 or 16 rows.
inline SkinnyPlan plan_skinny(int64_t n, int64_t units, int granule, int sms) {
  SkinnyPlan plan{};
  for (plan.split = 4;; plan.split /= 2) {
    // Clusters of 4 do not tile every GPC (16 or 18 SMs): 132 SMs hold 32 of them.
    const int64_t clusters = std::max(plan.split == 4 ? sms / 4 - 1 : sms / plan.split, 1);
    plan.per_cluster = static_cast<int>(ceil_div(ceil_div(n, kBlockRows), clusters));
    plan.block_rows = static_cast<int>(ceil_div(ceil_div(n, clusters * plan.per_cluster), granule) * granule);
    if (plan.split == 1 || (plan.per_cluster <= kTileBlocks && units >= plan.split)) break;
  }
  plan.blocks = static_cast<int>(ceil_div(n, plan.block_rows));
  plan.clusters = static_cast<int>(ceil_div(plan.blocks, plan.per_cluster));
  return plan;
}

}  // namespace pyllm::gemm
