// Parameters of the grouped GEMM (mixture of experts): rows sorted by expert, each group of rows times its expert's weight.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/params.h"
#include "gemm/epilogue_params.h"

namespace pyllm {

// Some rows of one expert, and its neighbours that go over the weight together. A list of them, made on the device, is the work.
struct GroupedTile {
  int expert;
  int row;         // first row of the group of tiles
  int end;         // the expert's last row + 1
  uint32_t group;  // index of the group's first tile, and from bit 24 on the number of its tiles
};

struct GroupedParams {
  const void* x;    // [rows of x, K] of dtype; base and row stride multiples of 16 bytes
  const int* rows;  // [M] the row of x that sorted row m is; nullptr: x is sorted itself (gated needs it)
  const void* w;    // [E, N, K] contiguous; gated: N = 2F rows, gate first
  void* out;        // [kGroupedLead + M, columns] contiguous; results from row kGroupedLead on
  const GroupedTile* tiles;
  const int* count;  // of tiles
  int64_t max_tiles;
  int tile_rows;    // 8, 16, 32, 64, 128
  int64_t m, n, k;  // n: a multiple of 8 (gated: 16), k of 16 bytes
  int64_t experts;
  int64_t x_stride;  // elements
  DType dtype;       // bf16, fp16, e4m3
  DType out_dtype;   // bf16, fp16
  bool gated;
  int act = gemm::kNoActivation;
  float alpha = 0.f, limit = 0.f;  // limit > 0, gated: g sigmoid(alpha g) (u + 1), g at most limit, u within -limit .. limit, and not act
  const float* x_scale = nullptr;  // [rows of x]; e4m3 alone
  const float* w_scale = nullptr;  // [E, N]; e4m3 alone
  const void* bias = nullptr;      // [E, N] of out_dtype
};

// Rows before the results that stores of clipped tiles count from; never written.
constexpr int kGroupedLead = 64;

void grouped_linear(const GroupedParams& p, cudaStream_t stream);

}  // namespace pyllm
