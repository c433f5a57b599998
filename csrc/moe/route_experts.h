// Parameters of the choice of experts.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/params.h"

namespace pyllm {

enum class Scoring : int { kSoftmax, kTopkSoftmax, kSigmoid };

constexpr int kMaxRouted = 1024;  // experts
constexpr int kMaxTopK = 32;
constexpr int kMaxGroups = 32;

struct RouteParams {
  const void* logits;  // [tokens, experts] of dtype, rows `stride` elements apart
  const float* bias;   // [experts] or nullptr: added for the choice alone
  float* weights;      // [tokens, top_k]
  int* ids;            // [tokens, top_k]
  int64_t tokens, stride;
  int experts, top_k;
  Scoring scoring;
  bool renormalize;
  float scale;
  int groups, top_groups;  // 1 .. kMaxGroups groups of consecutive experts; the choice is among the best top_groups of them
  DType dtype;             // bf16, fp16, fp32
};

void route_experts(const RouteParams& p, cudaStream_t stream);

}  // namespace pyllm
