// Building blocks of the row-wise kernels of this folder: 16-byte access, conversion, and a row reduction with one barrier.
//
// Layout: a row of N elements is N / V vectors of 16 bytes (V = 16 / sizeof(T)). `threads` threads own it, Vectors each, in registers:
// warp w holds the vectors [32 * Vectors * w, 32 * Vectors * (w + 1)), lane l of it those at l, l + 32, l + 64, ... (constant distances,
// so one address register serves a tensor). `threads` is a function of the row length alone (row.h), hence the order of every sum is too,
// whatever the number of rows, of rows per CTA, of CTAs or of CTAs per cluster.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/fp8.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "norm/row.h"

namespace pyllm::norm {

// Rows are read once: they stay out of L1, which then keeps the weights. The asm is volatile with a memory clobber so that all loads
// of a row (and of the prefetched next row) are issued where they stand, ahead of the reduction's barrier. !ok: zeros, no access.
__device__ __forceinline__ uint4 load_stream(const void* p, bool ok) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{ .reg .pred ok; setp.ne.b32 ok, %5, 0; @ok ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(static_cast<int>(ok))
               : "memory");
  return v;
}

// Weights are constants of the model: no kernel of the stream writes them, so the read-only path is safe even before pdl_wait().
__device__ __forceinline__ uint4 load_constant(const void* p, bool ok) {
  return ok ? __ldg(static_cast<const uint4*>(p)) : make_uint4(0, 0, 0, 0);
}

// Keeps the compiler from converting `v` once outside a loop over rows: the fp32 copy would take twice the registers.
__device__ __forceinline__ uint4 stay_packed(uint4 v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
}

template <class Word>
__device__ __forceinline__ void store_row(void* p, const Word& v) {
  if constexpr (kStreamStores) {
    __stcs(static_cast<Word*>(p), v);
  } else {
    *static_cast<Word*>(p) = v;
  }
}

template <class T>
inline constexpr int kVec = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ void unpack(uint32_t word, float& lo, float& hi, __nv_bfloat16) {
  lo = __uint_as_float(word << 16);
  hi = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void unpack(uint32_t word, float& lo, float& hi, __half) {
  const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&word));
  lo = f.x;
  hi = f.y;
}
__device__ __forceinline__ uint32_t pack(float lo, float hi, __nv_bfloat16) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t pack(float lo, float hi, __half) {
  const __half2 v = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}

template <class T>
__device__ __forceinline__ void unpack(const uint4& v, float* f) {
  if constexpr (sizeof(T) == 4) {
    f[0] = __uint_as_float(v.x), f[1] = __uint_as_float(v.y), f[2] = __uint_as_float(v.z), f[3] = __uint_as_float(v.w);
  } else {
    unpack(v.x, f[0], f[1], T{}), unpack(v.y, f[2], f[3], T{}), unpack(v.z, f[4], f[5], T{}), unpack(v.w, f[6], f[7], T{});
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float* f) {
  if constexpr (sizeof(T) == 4) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  } else {
    return make_uint4(pack(f[0], f[1], T{}), pack(f[2], f[3], T{}), pack(f[4], f[5], T{}), pack(f[6], f[7], T{}));
  }
}

// q = e4m3(y * inv) of one vector of 4 or 8 values, stored as 4 or 8 bytes.
template <int V>
__device__ __forceinline__ void store_e4m3(uint8_t* p, const float* y, float inv) {
  uint32_t word[V / 4];
#pragma unroll
  for (int i = 0; i < V / 4; ++i) {
    const float* f = y + 4 * i;
    const uint32_t lo = to_e4m3x2(f[0] * inv, f[1] * inv), hi = to_e4m3x2(f[2] * inv, f[3] * inv);
    word[i] = lo | hi << 16;
  }
  if constexpr (V == 8) {
    store_row(p, make_uint2(word[0], word[1]));
  } else {
    store_row(p, word[0]);
  }
}

__device__ __forceinline__ float scale_of(float absmax) { return fmaxf(__fdiv_rn(absmax, kE4M3Max), kMinScale); }
__device__ __forceinline__ float inverse(float scale) { return __fdiv_rn(1.f, scale); }

__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void store_cluster(const float* p, int rank, float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(p));
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2; }" ::"r"(here), "r"(rank),
               "f"(x)
               : "memory");
#endif
}
__device__ __forceinline__ int cluster_rank() {
  int rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Where this thread stands: which rows it walks, which vectors of a row it owns, and the reduction over the threads of the row.
// A row belongs to one warp of a CTA (RowPlan::threads == 32), to one CTA, or to one cluster of CTAs; the result has the same bits
// in the last two, since a thread keeps its vectors and a warp its slot in the second step of the sum.
template <int Vectors>
class RowThreads {
 public:
  __device__ __forceinline__ RowThreads(const RowPlan& plan, float (*slots)[32])
      : threads(plan.threads), cluster_(plan.cluster), slots_(slots) {
    const int rank = plan.cluster > 1 ? cluster_rank() : 0;
    tid = rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    first = tid / 32 * (32 * Vectors) + tid % 32;
    first_row = blockIdx.x / plan.cluster * blockDim.y + threadIdx.y;
    row_step = gridDim.x / plan.cluster * blockDim.y;
  }

  __device__ __forceinline__ int vector(int j) const { return first + j * 32; }

  // PDL and cluster prologue. Every thread of the cluster has started once wait() returns: remote shared memory may be written.
  __device__ __forceinline__ void arrive() const {
    if (cluster_ > 1) cluster_arrive();
    pdl_trigger();
  }
  __device__ __forceinline__ void wait() const {
    pdl_wait();
    if (cluster_ > 1) cluster_wait();
  }

  // One barrier: consecutive reductions alternate between two sets of slots, and nobody can be two barriers ahead.
  template <class Op>
  __device__ __forceinline__ float reduce(float x, Op op) {
    x = warp_reduce(x, op);
    const int warps = threads / 32;
    if (warps == 1) return x;
    float* slots = slots_[parity_];
    parity_ ^= 1;
    const int lane = tid % 32;
    if (cluster_ > 1) {
      if (lane < cluster_) store_cluster(slots + tid / 32, lane, x);
      cluster_arrive();
      cluster_wait();
    } else {
      if (lane == 0) slots[tid / 32] = x;
      __syncthreads();
    }
    const int span = 1 << (32 - __clz(warps - 1));  // warps rounded up to a power of two, 2 .. 32
    const int slot = lane & (span - 1);
    x = slot < warps ? slots[slot] : Op::identity();
    for (int offset = span / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
  }

  int tid;             // among the threads of the row
  int threads;         // of the row
  int first;           // first vector of this thread
  uint32_t first_row;  // rows fit in 31 bits, so row + row_step fits in 32; addresses are 64-bit
  uint32_t row_step;

 private:
  int cluster_;
  int parity_ = 0;
  float (*slots_)[32];
};

}  // namespace pyllm::norm
