// How the CTAs of one decode step hand values to one another: the data are the flag, so there is no barrier, fence or counter in the step.
//
// Rows of bf16 (qkv, attention output, residual stream, gated activations) have a place of their own for each layer, and hold zeros until
// they are written. A word, a pair of values, is stored complemented: only the pair 0xffff, 0xffff would be zero then, and rounding gives
// no such NaN. A reader asks again for words that are zero. Two sets take turns from step to step; a step clears the other one's.
//
// Partial results of attention are fp32 packets with the stamp of (step, layer) beside each value, read until the stamp is right.
//
// All accesses are relaxed ones of gpu scope, and nothing depends on the order of two of them.
#pragma once
#include <cstdint>

#include "common/vec.cuh"

namespace pyllm::step {

// A row to read: words are `word ^ flip`; flip 0: constants, there from the start.
struct Source {
  const uint8_t* base;
  uint32_t flip;
};

__device__ __forceinline__ uint4 load_relaxed_16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_relaxed(const void* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_relaxed(void* p, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ bool arrived(const uint4& v, uint32_t flip) {
  return flip == 0 || (v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0);
}
__device__ __forceinline__ uint4 flipped(const uint4& v, uint32_t flip) { return {v.x ^ flip, v.y ^ flip, v.z ^ flip, v.w ^ flip}; }

__device__ __forceinline__ uint32_t bf16_pair(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return reinterpret_cast<const uint32_t&>(v);
}
__device__ __forceinline__ float2 from_bf16_pair(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ void publish(uint8_t* to, float lo, float hi) { store_relaxed(to, ~bf16_pair(lo, hi)); }

// 16 bytes of each of `Pieces` rows, `at` bytes into the row; zeros where that is negative. Words are stored with `flip`. One warp.
template <int Pieces>
__device__ __forceinline__ void wait_pieces(uint4 (&v)[Pieces], const uint8_t* const (&from)[Pieces], const int (&at)[Pieces],
                                            uint32_t flip) {
  bool missing[Pieces];
#pragma unroll
  for (int i = 0; i < Pieces; ++i) {
    v[i] = {flip, flip, flip, flip};
    missing[i] = at[i] >= 0;
    if (missing[i]) v[i] = load_relaxed_16(from[i] + at[i]);
  }
  while (true) {
    bool any = false;
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      missing[i] = missing[i] && !arrived(v[i], flip);
      any = any || missing[i];
    }
    if (!__any_sync(0xffffffffu, any)) break;
#pragma unroll
    for (int i = 0; i < Pieces; ++i) {
      if (missing[i]) v[i] = load_relaxed_16(from[i] + at[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < Pieces; ++i) v[i] = flipped(v[i], flip);
}

// Two fp32 with their stamps.
struct Packets {
  uint64_t first, second;
};
__device__ __forceinline__ uint64_t packet(float value, uint32_t stamp) {
  return static_cast<uint64_t>(stamp) << 32 | __float_as_uint(value);
}
__device__ __forceinline__ void store_packets(uint64_t* to, float first, float second, uint32_t stamp) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(packet(first, stamp)), "l"(packet(second, stamp)) : "memory");
}
__device__ __forceinline__ Packets load_packets(const uint64_t* from) {
  Packets v;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.first), "=l"(v.second) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ bool stamped(const Packets& v, uint32_t stamp) {
  return static_cast<uint32_t>(v.first >> 32) == stamp && static_cast<uint32_t>(v.second >> 32) == stamp;
}
__device__ __forceinline__ float2 values(const Packets& v) {
  return {__uint_as_float(static_cast<uint32_t>(v.first)), __uint_as_float(static_cast<uint32_t>(v.second))};
}

}  // namespace pyllm::step
