// Parameters of the sort of (token, expert) pairs.
#pragma once
#include "gemm/grouped_linear.h"

namespace pyllm {

constexpr int kMaxExperts = 1024;

struct SortParams {
  const int* ids;      // [pairs]: the expert of each, pairs of a token side by side
  int64_t pairs;       // 1 .. 2^28
  int experts;         // 1 .. kMaxExperts
  int top_k;           // pairs of a token
  int tile_rows;       // of the grouped GEMM that follows
  int* rows;           // [pairs]: the token of each sorted row
  int* positions;      // [pairs]: the sorted row of each pair; -1 where its expert does not exist
  GroupedTile* tiles;  // [at least max_tiles]
  int* count;          // [1]: of tiles
};

// Tiles that any routing of so many pairs needs at most.
inline int64_t max_tiles(int64_t pairs, int64_t experts, int tile_rows) { return (pairs < experts ? pairs : experts) + pairs / tile_rows; }

void sort_experts(const SortParams& p, cudaStream_t stream);

}  // namespace pyllm
