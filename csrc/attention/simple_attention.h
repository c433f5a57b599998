#pragma once
#include "attention/simple_params.cuh"
#include "common/params.h"

namespace pyllm {

// How a step is launched; follows from the shapes and from what the host knows of q_starts, never from device data.
struct SimpleAttentionPlan {
  bool few;    // tiles of 16 rows, warps share the keys; else 64 rows
  int tiles;   // of rows, at most
  int splits;  // of the keys
};

// max_q: the most rows of a sequence, 0 where the host does not know; max_keys: the most keys.
SimpleAttentionPlan plan_simple_attention(const SimpleAttentionParams& p, int64_t max_q, int64_t max_keys);

// dim: D = Dv, of 64, 96, 128, 256. dtype: of q; fp8: k and v are e4m3. p.splits is that of the plan, with p.partial and p.partial_lse
// where it is more than 1.
void simple_attention(const SimpleAttentionParams& p, const SimpleAttentionPlan& plan, int dim, DType dtype, bool fp8, cudaStream_t stream);

}  // namespace pyllm
