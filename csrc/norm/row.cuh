// Building blocks of the row-wise kernels of this folder: 16-byte access, conversion, and a row reduction with one barrier.
//
// Layout: a row of N elements is N / V vectors of 16 bytes (V = 16 / sizeof(T)), in registers. A logical thread owns `unit` vectors:
// logical warp w holds the vectors [32 * unit * w, 32 * unit * (w + 1)), lane l of it those at l, l + 32, ... (constant distances, so one
// address register serves a tensor). A thread holds one logical thread, or `fold` of them: the same lane of neighbouring logical warps.
// The number of logical threads is a function of the row length alone (row.h) and their sums are kept apart up to the place where a
// logical warp's sum takes its slot, hence the order of every sum is too, whatever the number of rows, of CTAs per cluster, or fold.
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

// The asm is volatile with a memory clobber so that all loads of a row are issued where they stand, ahead of the reduction's barrier.
// Plain loads: with L1::no_allocate the same kernels took 2-10 % longer on an H200. !ok: zeros, no access.
__device__ __forceinline__ uint4 load_vector(const void* p, bool ok) {
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{ .reg .pred ok; setp.ne.b32 ok, %5, 0; @ok ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(p), "r"(static_cast<int>(ok))
               : "memory");
  return v;
}

// Weights are constants of the model: no kernel of the stream writes them, so the read-only path is safe even before pdl_wait().
// InOrder: the plain path instead, whose loads ptxas keeps behind earlier stores; with many vectors per thread it would otherwise load
// all weights ahead of the first store and spill.
// !ok: zeros, no access. Predicates, here and in store_vector, and no branches: behind a branch per vector every load waits for the one
// before it, 4 L1 latencies in a row with 4 vectors per thread, 8 with a scale per row.
template <bool InOrder>
__device__ __forceinline__ uint4 load_constant(const void* p, bool ok) {
  if constexpr (InOrder) return load_vector(p, ok);
  uint4 v = make_uint4(0, 0, 0, 0);
  asm("{ .reg .pred ok; setp.ne.b32 ok, %5, 0; @ok ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"(static_cast<int>(ok)));
  return v;
}

__device__ __forceinline__ void store_vector(void* p, const uint4& v, bool ok) {
  asm volatile("{ .reg .pred ok; setp.ne.b32 ok, %5, 0; @ok st.global.v4.b32 [%4], {%0, %1, %2, %3}; }" ::"r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w), "l"(p), "r"(static_cast<int>(ok))
               : "memory");
}
__device__ __forceinline__ void store_vector(void* p, const uint2& v, bool ok) {
  asm volatile("{ .reg .pred ok; setp.ne.b32 ok, %3, 0; @ok st.global.v2.b32 [%2], {%0, %1}; }" ::"r"(v.x), "r"(v.y), "l"(p),
               "r"(static_cast<int>(ok))
               : "memory");
}
__device__ __forceinline__ void store_vector(void* p, uint32_t v, bool ok) {
  asm volatile("{ .reg .pred ok; setp.ne.b32 ok, %2, 0; @ok st.global.b32 [%1], %0; }" ::"r"(v), "l"(p), "r"(static_cast<int>(ok))
               : "memory");
}

// Keeps the compiler from holding on to a conversion of `v` between two uses: the fp32 copy would take twice the registers.
__device__ __forceinline__ uint4 stay_packed(uint4 v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
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
__device__ __forceinline__ void store_e4m3(uint8_t* p, const float* y, float inv, bool ok) {
  uint32_t word[V / 4];
#pragma unroll
  for (int i = 0; i < V / 4; ++i) {
    const float* f = y + 4 * i;
    const uint32_t lo = to_e4m3x2(f[0] * inv, f[1] * inv), hi = to_e4m3x2(f[2] * inv, f[3] * inv);
    word[i] = lo | hi << 16;
  }
  if constexpr (V == 8) {
    store_vector(p, make_uint2(word[0], word[1]), ok);
  } else {
    store_vector(p, word[0], ok);
  }
}

// max(absmax / 448, 1e-10), the quotient rounded as IEEE has it, without the slow path of a division: one step of Newton with a correctly
// rounded reciprocal, equal to the division for every non-negative float (all of them compared; where the remainder underflows the floor
// counts). Infinity stays: the step would make it NaN.
__device__ __forceinline__ float scale_of(float absmax) {
  constexpr float kReciprocal = 1.f / kE4M3Max;
  const float q = __fmul_rn(absmax, kReciprocal);
  const float exact = fmaf(fmaf(-kE4M3Max, q, absmax), kReciprocal, q);
  return fmaxf(absmax < INFINITY ? exact : q, kMinScale);
}
__device__ __forceinline__ float inverse(float scale) { return __frcp_rn(scale); }
// The same of a result of scale_of(), from 1e-10 to 2^120 or infinity: the instructions that __frcp_rn itself takes for exponents from
// 2^-126 to 2^125, without its call for the rest.
__device__ __forceinline__ float inverse_of_dynamic(float scale) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(scale));
  return scale < INFINITY ? fmaf(r, -fmaf(scale, r, -1.f), r) : 0.f;
}

// Reduces Values values per lane over the warp. Lane l gets the result of value l / (32 / Values): each of the first steps halves the
// values a lane carries, 8 values take 9 shuffles. The bits of every result are those of warp_reduce.
template <int Values, class Op>
__device__ __forceinline__ float warp_reduce_each(float (&x)[Values], int lane, Op op) {
  int offset = 16;
#pragma unroll
  for (int half = Values / 2; half > 0; half /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + half], offset);
      x[i] = op(upper ? x[i + half] : x[i], other);
    }
    offset /= 2;
  }
#pragma unroll
  for (; offset > 0; offset /= 2) x[0] = op(x[0], __shfl_xor_sync(0xffffffffu, x[0], offset));
  return x[0];
}

// Scratch of the row reduction, in shared memory.
struct alignas(16) RowScratch {
  float2 slots[2][32];
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

  template <class Op>
  __device__ __forceinline__ float reduce(float x, Op op) {
    float values[1] = {x};
    return reduce<false>(values, 0.f, op).x;
  }
  template <int Values>
  __device__ __forceinline__ float sum(float (&x)[Values]) {
    return reduce<false>(x, 0.f, SumOp{}).x;
  }
  // A sum and a maximum behind one barrier.
  template <int Values>
  __device__ __forceinline__ float2 sum_and_max(float (&x)[Values], float max) {
    return reduce<true>(x, max, SumOp{});
  }

  int first;           // first vector of this thread; 0: the first thread of the row
  uint32_t first_row;  // rows fit in 31 bits, so the row after the last fits in 32; addresses are 64-bit

 private:
  __device__ __forceinline__ uint32_t bar(int set) const { return scratch_ + 512 + set * 8; }

  // One barrier. Consecutive reductions alternate between two sets of slots: a thread can start reduction i + 2 only when all have
  // contributed to i + 1, hence have read the slots of i. Every logical warp has a slot; max, if there is one, is in all slots of a warp.
  template <bool Max, int Values, class Op>
  __device__ __forceinline__ float2 reduce(float (&values)[Values], float max, Op op) {
    constexpr int kLanes = 32 / Values;  // that have the same value
    int place = first;
    asm volatile("" : "+r"(place));  // lane and warp anew each time: kept between reductions they would cost registers
    const int lane = place % 32, warp = place / (32 * Vectors);
    float x = warp_reduce_each(values, lane, op);
    if constexpr (Max) max = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(max)));  // no sign: ordered as integers
    if (warps_ == 1) {
#pragma unroll
      for (int offset = 16; offset >= kLanes; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
      return {x, max};
    }
    const int set = count_ & 1;
    const uint32_t slots = scratch_ + set * 256;
    const uint32_t mine = slots + (warp * Values + lane / kLanes) * 8;
    if (Values == 1 && cluster_ > 1) {
      exchange<Max>(mine, x, max, lane, bar(set), count_ >> 1 & 1);
    } else {
      if (lane % kLanes == 0) {
        if constexpr (Max) {
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(mine), "f"(x), "f"(max) : "memory");
        } else {
          asm volatile("st.shared.f32 [%0], %1;" ::"r"(mine), "f"(x) : "memory");
        }
      }
      __syncthreads();
    }
    ++count_;
    const int used = warps_ * Values;
    if (used == 8) return tree_of_8<Max>(slots, op);
    const int span = 1 << (32 - __clz(used - 1));  // rounded up to a power of two, 2 .. 32
    const int slot = lane & (span - 1);
    x = Op::identity();
    if constexpr (Max) max = MaxOp::identity();
    if (slot < used) {
      if constexpr (Max) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(max) : "r"(slots + slot * 8) : "memory");
      } else {
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(slots + slot * 8) : "memory");
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      if (offset < span) {
        x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
        if constexpr (Max) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, offset));
      }
    }
    return {x, max};
  }

  // The 8 slots (rows of 4096 two-byte elements), by the tree of the shuffles below (addition commutes to the bit), without their latency.
  template <bool Max, class Op>
  static __device__ __forceinline__ float2 tree_of_8(uint32_t slots, Op op) {
    float x[8], max[8];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(x[i]), "=f"(max[i]), "=f"(x[i + 1]), "=f"(max[i + 1])
                   : "r"(slots + i * 8)
                   : "memory");
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
#pragma unroll
      for (int i = 0; i < offset; ++i) {
        x[i] = op(x[i], x[i + offset]);
        if constexpr (Max) max[i] = fmaxf(max[i], max[i + offset]);
      }
    }
    return {x[0], max[0]};
  }

  // Every warp puts its value into `slot` of every CTA of the cluster; returns when all values of the row have come. Asynchronous stores
  // that count on an mbarrier: a cluster barrier with release semantics would wait for this thread's global stores as well.
  template <bool Max>
  __device__ __forceinline__ void exchange(uint32_t slot, float x, float max, int lane, uint32_t bar, int phase) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(warps_ * (Max ? 8 : 4)) : "memory");
    }
    if (lane < cluster_) {
      uint32_t to, on;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(slot), "r"(lane));
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(on) : "r"(bar), "r"(lane));
      if constexpr (Max) {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                     "r"(__float_as_uint(x)), "r"(__float_as_uint(max)), "r"(on)
                     : "memory");
      } else {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(__float_as_uint(x)), "r"(on)
                     : "memory");
      }
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

static_assert(offsetof(RowScratch, bars) == 512, "RowThreads addresses the scratch by hand");

}  // namespace pyllm::norm
