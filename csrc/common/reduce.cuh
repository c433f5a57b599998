// Warp and block reductions in a fixed order: the result depends on the block size alone, never on the grid.
#pragma once
#include <cuda_runtime.h>

namespace pyllm {

struct SumOp {
  static __device__ __forceinline__ float identity() { return 0.f; }
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct MaxOp {
  static __device__ __forceinline__ float identity() { return -INFINITY; }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class Op, int Width = 32>
__device__ __forceinline__ float warp_reduce(float x, Op op) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// All threads get the result. `smem` holds Threads / 32 floats and may be reused only after another barrier.
template <int Threads, class Op>
__device__ __forceinline__ float block_reduce(float x, float* smem, Op op) {
  constexpr int kWarps = Threads / 32;
  x = warp_reduce(x, op);
  if constexpr (kWarps == 1) return x;
  if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < kWarps ? smem[threadIdx.x % 32] : Op::identity();
  return warp_reduce(x, op);
}

}  // namespace pyllm
