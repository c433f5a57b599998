// Building blocks of the row-wise kernels of this folder: 16-byte access, conversion, and a row reduction with one barrier.
//
// Layout: a row of N elements is N / V vectors of 16 bytes (V = 16 / sizeof(T)). `threads` threads own it, Vectors each, in registers:
// warp w holds the vectors [32 * Vectors * w, 32 * Vectors * (w + 1)), lane l of it those at l, l + 32, l + 64, ... (constant distances,
// so one address register serves a tensor). `threads` is a function of the row length alone (row.h), hence the order of every sum is too,
// whatever the number of rows, of rows per CTA, of CTAs or of CTAs per cluster.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
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
__device__ __forceinline__ float inverse(float scale) { return __frcp_rn(scale); }

// Scratch of the row reduction, in shared memory.
struct RowScratch {
  float slots[2][32];
  uint64_t bars[2];  // mbarriers, used where a cluster owns a row
};

// Where this thread stands: which rows it walks, which vectors of a row it owns, and the reduction over the threads of the row.
// A row belongs to one warp of a CTA (RowPlan::threads == 32), to one CTA, or to one cluster of CTAs; the result has the same bits
// in the last two, since a thread keeps its vectors and a warp its slot in the second step of the sum.
template <int Vectors>
class RowThreads {
 public:
  __device__ __forceinline__ RowThreads(const RowPlan& plan, RowScratch& scratch)
      : warps_(plan.threads / 32), cluster_(1 << plan.cluster_log2), scratch_(static_cast<uint32_t>(__cvta_generic_to_shared(&scratch))) {
    int rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (cluster_ > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    const int thread = rank * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    first = thread / 32 * (32 * Vectors) + thread % 32;
    first_row = (blockIdx.x >> plan.cluster_log2) * blockDim.y + threadIdx.y;
  }

  __device__ __forceinline__ int vector(int j) const { return first + j * 32; }

  // PDL and cluster prologue: after wait() predecessors' writes are visible, and the shared memory of the cluster may be written.
  __device__ __forceinline__ void arrive() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (cluster_ > 1) {
      if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; mbarrier.init.shared::cta.b64 [%1], 1;" ::"r"(bar(0)), "r"(bar(1)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      }
      __syncwarp();
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
#endif
    pdl_trigger();
  }
  __device__ __forceinline__ void wait() const {
    pdl_wait();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (cluster_ > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  // One barrier. Consecutive reductions alternate between two sets of slots: a thread can start reduction i + 2 only when all have
  // contributed to i + 1, hence have read the slots of i.
  template <class Op>
  __device__ __forceinline__ float reduce(float x, Op op) {
    x = warp_reduce(x, op);
    if (warps_ == 1) return x;
    int place = first;
    asm volatile("" : "+r"(place));  // lane and warp anew each time: kept across the loop over rows they would cost registers
    const int lane = place % 32, warp = place / (32 * Vectors);
    const int set = count_ & 1;
    const uint32_t slots = scratch_ + set * 128;
    if (cluster_ > 1) {
      exchange(slots + warp * 4, x, lane, bar(set), count_ >> 1 & 1);
    } else {
      if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(slots + warp * 4), "f"(x) : "memory");
      __syncthreads();
    }
    ++count_;
    const int span = 1 << (32 - __clz(warps_ - 1));  // warps rounded up to a power of two, 2 .. 32
    const int slot = lane & (span - 1);
    x = Op::identity();
    if (slot < warps_) asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(slots + slot * 4) : "memory");
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (offset < span) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
    }
    return x;
  }

  int first;           // first vector of this thread; 0: the first thread of the row
  uint32_t first_row;  // rows fit in 31 bits, so the row after the last fits in 32; addresses are 64-bit

 private:
  __device__ __forceinline__ uint32_t bar(int set) const { return scratch_ + 256 + set * 8; }

  // Every warp puts its value into `slot` of every CTA of the cluster; returns when all values of the row have come. Asynchronous stores
  // that count on an mbarrier: a cluster barrier with release semantics would wait for this thread's global stores as well.
  __device__ __forceinline__ void exchange(uint32_t slot, float x, int lane, uint32_t bar, int phase) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(warps_ * 4) : "memory");
    if (lane < cluster_) {
      asm volatile(
          "{ .reg .b32 to, on; mapa.shared::cluster.u32 to, %0, %2; mapa.shared::cluster.u32 on, %1, %2;"
          "  st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %3, [on]; }" ::"r"(slot),
          "r"(bar), "r"(lane), "r"(__float_as_uint(x))
          : "memory");
    }
    int done = 0;
    while (!done) {
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                   : "=r"(done)
                   : "r"(bar), "r"(phase)
                   : "memory");
    }
    __syncwarp();
#endif
  }

  int warps_;
  int cluster_;
  uint32_t scratch_;
  int count_ = 0;
};

static_assert(offsetof(RowScratch, bars) == 256, "RowThreads addresses the scratch by hand");

}  // namespace pyllm::norm
