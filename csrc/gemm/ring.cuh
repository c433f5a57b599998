// What the kernels of a feeding and two multiplying warpgroups share: their ring of stages, the turns of the two, pairs of results.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/ptx_sm90.cuh"

namespace pyllm::gemm {

// A place in the ring of C::kStages stages.
template <class C>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == C::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int steps) {
    const int to = stage + steps;
    phase ^= to / C::kStages & 1;
    stage = to % C::kStages;
  }
};

// This warp has read the stage.
__device__ __forceinline__ void release(uint32_t empty) {
  if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

// Of warpgroups 1 and 2 on tiles in turns: one waits for its stages only when the other has seen all of its own arrive, since a barrier
// tells only odd phases from even ones. The named barriers 3 and 4 pass the turn on.
__device__ __forceinline__ void take_turn() { named_sync(2 + static_cast<int>(threadIdx.x / 128), 256); }
__device__ __forceinline__ void pass_turn() { named_arrive(5 - static_cast<int>(threadIdx.x / 128), 256); }

template <class Out>
__device__ __forceinline__ uint32_t pack(float a, float b) {
  if constexpr (std::is_same_v<Out, __nv_bfloat16>) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    const __half2 v = __floats2half2_rn(a, b);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}

}  // namespace pyllm::gemm
