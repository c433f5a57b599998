// What products and attention of a decode step are made of: e4m3 as fp16, and the 8-row mma.
#pragma once
#include <type_traits>

#include "common/ptx_sm90.cuh"
#include "common/shared_access.cuh"
#include "common/vec.cuh"

namespace pyllm::step {

// Two e4m3 as fp16, exactly.
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t two) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two)));
  return halves;
}

// c += a b over 16 of k: a has 8 rows (of mma m16n8k16; the other 8 are zeros), b 8 columns. A lane gives row lane / 4 of a and column
// lane / 4 of b, each pairs of k in two registers, and gets columns 2 (lane % 4) and the next one of its row in c[0] and c[1].
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(0), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(0), "r"(b0), "r"(b1));
  }
}

// The same with 32 of k at a time: a has the eight rows twice, as rows 0 to 7 with one half of k and as 8 to 15 with the other, so that 16
// bytes of a row in memory are the operand as they are. Columns 0 to 3 of b are up to four rows of x over the first half, 4 to 7 the same
// over the second; what rows 0 to 7 give with columns 4 to 7, and the others with 0 to 3, means nothing.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, const uint2& b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b.x), "r"(b.y));
  }
}

}  // namespace pyllm::step
