// Parameters of the routed gated MLPs: sort, grouped GEMM with the gated activation, grouped GEMM, weighted sum.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/params.h"
#include "moe/sort_experts.h"

namespace pyllm {

struct ExpertsParams {
  const void* x;                            // [T, N] of out_dtype; base and row stride multiples of 16 bytes
  const void* w13;                          // [E, 2F, N] of dtype, contiguous, gate rows first
  const void* w2;                           // [E, N, F] of dtype, contiguous
  const int* ids;                           // [T, top_k] contiguous
  const float* weights;                     // [T, top_k] contiguous
  void* out;                                // [T, N] contiguous
  int64_t tokens, n, f, experts, x_stride;  // n and f: multiples of 8, e4m3 16
  int top_k, act, tile_rows;
  DType dtype;      // bf16, fp16 (both as out_dtype), e4m3
  DType out_dtype;  // bf16, fp16
  // e4m3 alone: scales of the weights' rows. x and the inner rows get one for each row.
  const float* w13_scale = nullptr;  // [E, 2F]
  const float* w2_scale = nullptr;   // [E, N]
  const void* w13_bias = nullptr;    // [E, 2F] of out_dtype, or none
  const void* w2_bias = nullptr;     // [E, N] of out_dtype, or none
  float alpha = 0.f, limit = 0.f;    // limit > 0: the clamped activation g sigmoid(alpha g) (u + 1), act has no effect
  // Workspaces.
  GroupedTile* tiles;         // [max_tiles]
  int* count;                 // [1]
  int* rows;                  // [T top_k]
  int* positions;             // [T top_k]
  void* inner;                // [kGroupedLead + T top_k, F] of out_dtype
  void* sorted;               // [kGroupedLead + T top_k, N] of out_dtype
  void* quantized = nullptr;  // e4m3: [T, N] and [T top_k, F], the larger
  float* x_scale = nullptr;   // e4m3: [T] and [T top_k], the larger
};

// Rows of x that a tile holds, by how many an expert has on average.
int expert_tile_rows(int64_t pairs, int64_t experts);

void fused_experts(const ExpertsParams& p, cudaStream_t stream);

}  // namespace pyllm
