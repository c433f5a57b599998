// advance_rows: token = max(sampled, 0), position += active, kv_len += active, slots = table[position / page] * page + position % page.
//
// Layout: a thread per row. A decode step ends with it: as separate element-wise ops the same took 8 launches, 8 us behind the sampling of
// one row on an H200, which is 1 % of a step of a 1B model.
// Limits: int32 everywhere. A position behind the last page of a row (its request has ended) gives a slot of that last page.
#pragma once
#include "common/launch.h"
#include "fused/advance_rows.h"

namespace pyllm::fused {

inline constexpr int kAdvanceThreads = 128;

__global__ void __launch_bounds__(kAdvanceThreads) advance_rows_kernel(const __grid_constant__ AdvanceRowsParams p) {
  const int row = blockIdx.x * kAdvanceThreads + threadIdx.x;
  pdl_trigger();
  pdl_wait();
  if (row >= p.n) return;
  const int active = p.active[row], position = p.position[row] + active;
  const int column = min(position / p.page, p.width - 1);
  p.slots[row] = p.table[row * p.table_stride + column] * p.page + position % p.page;
  p.position[row] = position;
  p.kv_len[row] += active;
  p.token[row] = max(p.sampled[row], 0);
}

}  // namespace pyllm::fused
