// wgmma (sm_90a): D[64, N] (+)= A[64, k] B[k, N] by the four warps of a warpgroup; A from shared memory or registers, B from shared memory.
//
//   Wgmma<N>::ss<T, TransposeA, TransposeB>(d, a_descriptor, b_descriptor, accumulate)
//   Wgmma<N>::rs<T, TransposeB>(d, a_registers, b_descriptor, accumulate)
//
// T: __nv_bfloat16, __half (k = 16, fp32 sums), __nv_fp8_e4m3 (k = 32, fp32 sums of about 14 bits), int8_t (k = 32, int32 sums).
//
// k spans 32 bytes of a K-major row, so a K-major descriptor moves on by 32 bytes. Transpose (16-bit types): the operand is MN-major.
//
// d[4 i + 2 h + c] of lane l in warp w is row 16 w + 8 h + l / 4, column 8 i + 2 (l % 4) + c.
//
// a[0], a[1] of `rs` hold rows l / 4 and l / 4 + 8 at k-columns 2 (l % 4) and the next one (4 (l % 4) and the next three of 8-bit
// types), a[2], a[3] the same rows 8 (16) columns on.
//
// Order: wgmma_fence(); products; wgmma_commit(); ...; wgmma_wait<0>(); then read d. Registers of d and a stay untouched in between.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

namespace pyllm {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Keeps the compiler from moving reads or writes of registers that a product in flight uses across this point.
template <class R, int Size>
__device__ __forceinline__ void wgmma_pin(R (&d)[Size]) {
#pragma unroll
  for (int i = 0; i < Size; ++i) {
    if constexpr (std::is_same_v<R, float>) {
      asm volatile("" : "+f"(d[i])::"memory");
    } else {
      asm volatile("" : "+r"(d[i])::"memory");
    }
  }
}

enum class SmemLayout : uint64_t { kNone = 0, kSwizzle128 = 1, kSwizzle64 = 2, kSwizzle32 = 3 };

// Descriptor of an operand at a shared-memory address (a multiple of 16; the swizzled tile itself starts at a multiple of 1024 for 128-byte
// swizzle, 512 for 64, 256 for 32, since the swizzle is a function of the address).
// K-major, swizzle S (TMA box of S bytes per row): group_bytes = 8 S, the distance of 8-row groups; leading_bytes is not used.
// MN-major, swizzle S (box of S bytes along MN, one line per k): group_bytes = 8 S, the distance of groups of 8 k;
//   leading_bytes = the distance between neighbouring boxes of S bytes along MN.
template <SmemLayout Layout>
__device__ __forceinline__ uint64_t smem_descriptor(uint32_t address, uint32_t group_bytes, uint32_t leading_bytes = 16) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | static_cast<uint64_t>((leading_bytes & 0x3FFFF) >> 4) << 16 |
         static_cast<uint64_t>((group_bytes & 0x3FFFF) >> 4) << 32 | static_cast<uint64_t>(Layout) << 62;
}
// The descriptor `bytes` (a multiple of 16) further on.
__device__ __forceinline__ uint64_t descriptor_step(uint64_t descriptor, uint32_t bytes) { return descriptor + (bytes >> 4); }

template <int N>
struct Wgmma;

// Operand lists: PYLLM_LIST_r names registers %0 .. %(r-1), PYLLM_OUT_r(C) constrains them.
#define PYLLM_R0 "%0, %1, %2, %3"
#define PYLLM_R4 "%4, %5, %6, %7"
#define PYLLM_R8 "%8, %9, %10, %11"
#define PYLLM_R12 "%12, %13, %14, %15"
#define PYLLM_R16 "%16, %17, %18, %19"
#define PYLLM_R20 "%20, %21, %22, %23"
#define PYLLM_R24 "%24, %25, %26, %27"
#define PYLLM_R28 "%28, %29, %30, %31"
#define PYLLM_R32 "%32, %33, %34, %35"
#define PYLLM_R36 "%36, %37, %38, %39"
#define PYLLM_R40 "%40, %41, %42, %43"
#define PYLLM_R44 "%44, %45, %46, %47"
#define PYLLM_R48 "%48, %49, %50, %51"
#define PYLLM_R52 "%52, %53, %54, %55"
#define PYLLM_R56 "%56, %57, %58, %59"
#define PYLLM_R60 "%60, %61, %62, %63"
#define PYLLM_R64 "%64, %65, %66, %67"
#define PYLLM_R68 "%68, %69, %70, %71"
#define PYLLM_R72 "%72, %73, %74, %75"
#define PYLLM_R76 "%76, %77, %78, %79"
#define PYLLM_R80 "%80, %81, %82, %83"
#define PYLLM_R84 "%84, %85, %86, %87"
#define PYLLM_R88 "%88, %89, %90, %91"
#define PYLLM_R92 "%92, %93, %94, %95"
#define PYLLM_R96 "%96, %97, %98, %99"
#define PYLLM_R100 "%100, %101, %102, %103"
#define PYLLM_R104 "%104, %105, %106, %107"
#define PYLLM_R108 "%108, %109, %110, %111"
#define PYLLM_R112 "%112, %113, %114, %115"
#define PYLLM_R116 "%116, %117, %118, %119"
#define PYLLM_R120 "%120, %121, %122, %123"
#define PYLLM_R124 "%124, %125, %126, %127"
#define PYLLM_LIST_4 PYLLM_R0
#define PYLLM_LIST_8 PYLLM_LIST_4 ", " PYLLM_R4
#define PYLLM_LIST_12 PYLLM_LIST_8 ", " PYLLM_R8
#define PYLLM_LIST_16 PYLLM_LIST_12 ", " PYLLM_R12
#define PYLLM_LIST_20 PYLLM_LIST_16 ", " PYLLM_R16
#define PYLLM_LIST_24 PYLLM_LIST_20 ", " PYLLM_R20
#define PYLLM_LIST_28 PYLLM_LIST_24 ", " PYLLM_R24
#define PYLLM_LIST_32 PYLLM_LIST_28 ", " PYLLM_R28
#define PYLLM_LIST_36 PYLLM_LIST_32 ", " PYLLM_R32
#define PYLLM_LIST_40 PYLLM_LIST_36 ", " PYLLM_R36
#define PYLLM_LIST_44 PYLLM_LIST_40 ", " PYLLM_R40
#define PYLLM_LIST_48 PYLLM_LIST_44 ", " PYLLM_R44
#define PYLLM_LIST_52 PYLLM_LIST_48 ", " PYLLM_R48
#define PYLLM_LIST_56 PYLLM_LIST_52 ", " PYLLM_R52
#define PYLLM_LIST_60 PYLLM_LIST_56 ", " PYLLM_R56
#define PYLLM_LIST_64 PYLLM_LIST_60 ", " PYLLM_R60
#define PYLLM_LIST_68 PYLLM_LIST_64 ", " PYLLM_R64
#define PYLLM_LIST_72 PYLLM_LIST_68 ", " PYLLM_R68
#define PYLLM_LIST_76 PYLLM_LIST_72 ", " PYLLM_R72
#define PYLLM_LIST_80 PYLLM_LIST_76 ", " PYLLM_R76
#define PYLLM_LIST_84 PYLLM_LIST_80 ", " PYLLM_R80
#define PYLLM_LIST_88 PYLLM_LIST_84 ", " PYLLM_R84
#define PYLLM_LIST_92 PYLLM_LIST_88 ", " PYLLM_R88
#define PYLLM_LIST_96 PYLLM_LIST_92 ", " PYLLM_R92
#define PYLLM_LIST_100 PYLLM_LIST_96 ", " PYLLM_R96
#define PYLLM_LIST_104 PYLLM_LIST_100 ", " PYLLM_R100
#define PYLLM_LIST_108 PYLLM_LIST_104 ", " PYLLM_R104
#define PYLLM_LIST_112 PYLLM_LIST_108 ", " PYLLM_R108
#define PYLLM_LIST_116 PYLLM_LIST_112 ", " PYLLM_R112
#define PYLLM_LIST_120 PYLLM_LIST_116 ", " PYLLM_R116
#define PYLLM_LIST_124 PYLLM_LIST_120 ", " PYLLM_R120
#define PYLLM_LIST_128 PYLLM_LIST_124 ", " PYLLM_R124
#define PYLLM_D4(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define PYLLM_OUT_4(C) PYLLM_D4(C, 0)
#define PYLLM_OUT_8(C) PYLLM_OUT_4(C), PYLLM_D4(C, 4)
#define PYLLM_OUT_12(C) PYLLM_OUT_8(C), PYLLM_D4(C, 8)
#define PYLLM_OUT_16(C) PYLLM_OUT_12(C), PYLLM_D4(C, 12)
#define PYLLM_OUT_20(C) PYLLM_OUT_16(C), PYLLM_D4(C, 16)
#define PYLLM_OUT_24(C) PYLLM_OUT_20(C), PYLLM_D4(C, 20)
#define PYLLM_OUT_28(C) PYLLM_OUT_24(C), PYLLM_D4(C, 24)
#define PYLLM_OUT_32(C) PYLLM_OUT_28(C), PYLLM_D4(C, 28)
#define PYLLM_OUT_36(C) PYLLM_OUT_32(C), PYLLM_D4(C, 32)
#define PYLLM_OUT_40(C) PYLLM_OUT_36(C), PYLLM_D4(C, 36)
#define PYLLM_OUT_44(C) PYLLM_OUT_40(C), PYLLM_D4(C, 40)
#define PYLLM_OUT_48(C) PYLLM_OUT_44(C), PYLLM_D4(C, 44)
#define PYLLM_OUT_52(C) PYLLM_OUT_48(C), PYLLM_D4(C, 48)
#define PYLLM_OUT_56(C) PYLLM_OUT_52(C), PYLLM_D4(C, 52)
#define PYLLM_OUT_60(C) PYLLM_OUT_56(C), PYLLM_D4(C, 56)
#define PYLLM_OUT_64(C) PYLLM_OUT_60(C), PYLLM_D4(C, 60)
#define PYLLM_OUT_68(C) PYLLM_OUT_64(C), PYLLM_D4(C, 64)
#define PYLLM_OUT_72(C) PYLLM_OUT_68(C), PYLLM_D4(C, 68)
#define PYLLM_OUT_76(C) PYLLM_OUT_72(C), PYLLM_D4(C, 72)
#define PYLLM_OUT_80(C) PYLLM_OUT_76(C), PYLLM_D4(C, 76)
#define PYLLM_OUT_84(C) PYLLM_OUT_80(C), PYLLM_D4(C, 80)
#define PYLLM_OUT_88(C) PYLLM_OUT_84(C), PYLLM_D4(C, 84)
#define PYLLM_OUT_92(C) PYLLM_OUT_88(C), PYLLM_D4(C, 88)
#define PYLLM_OUT_96(C) PYLLM_OUT_92(C), PYLLM_D4(C, 92)
#define PYLLM_OUT_100(C) PYLLM_OUT_96(C), PYLLM_D4(C, 96)
#define PYLLM_OUT_104(C) PYLLM_OUT_100(C), PYLLM_D4(C, 100)
#define PYLLM_OUT_108(C) PYLLM_OUT_104(C), PYLLM_D4(C, 104)
#define PYLLM_OUT_112(C) PYLLM_OUT_108(C), PYLLM_D4(C, 108)
#define PYLLM_OUT_116(C) PYLLM_OUT_112(C), PYLLM_D4(C, 112)
#define PYLLM_OUT_120(C) PYLLM_OUT_116(C), PYLLM_D4(C, 116)
#define PYLLM_OUT_124(C) PYLLM_OUT_120(C), PYLLM_D4(C, 120)
#define PYLLM_OUT_128(C) PYLLM_OUT_124(C), PYLLM_D4(C, 124)

#define PYLLM_ASM_BEGIN(I) "{\n.reg .pred p;\nsetp.ne.b32 p, " I ", 0;\nwgmma.mma_async.sync.aligned."
#define PYLLM_A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// R = N / 2 registers of D; i0 .. i6: the numbers of the operands after them.
#define PYLLM_SS(SHAPE, R, C, i0, i1, i2, TAIL, ...) \
  asm volatile(PYLLM_ASM_BEGIN(i2) SHAPE " {" PYLLM_LIST_##R "}, " i0 ", " i1 ", p" TAIL ";\n}" : PYLLM_OUT_##R(C) : __VA_ARGS__)
#define PYLLM_RS(SHAPE, R, C, i0, i1, i2, i3, i4, i5, TAIL, ...)                                                          \
  asm volatile(PYLLM_ASM_BEGIN(i5) SHAPE " {" PYLLM_LIST_##R "}, {" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p" TAIL ";\n}" \
               : PYLLM_OUT_##R(C)                                                                                         \
               : __VA_ARGS__)
#define PYLLM_WGMMA(N, R, i0, i1, i2, i3, i4, i5, i6)                                                                                      \
  template <>                                                                                                                              \
  struct Wgmma<N> {                                                                                                                        \
    static constexpr int kRegisters = R;                                                                                                   \
    template <class T, bool TransposeA = false, bool TransposeB = false, class Sum>                                                        \
    static __device__ __forceinline__ void ss(Sum (&d)[R], uint64_t a, uint64_t b, bool accumulate) {                                      \
      const int keep = accumulate;                                                                                                         \
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                                                    \
        PYLLM_SS("m64n" #N "k16.f32.bf16.bf16", R, "+f", i0, i1, i2, ", 1, 1, " i3 ", " i4, "l"(a), "l"(b), "r"(keep),                     \
                 "n"(int(TransposeA)), "n"(int(TransposeB)));                                                                              \
      } else if constexpr (std::is_same_v<T, __half>) {                                                                                    \
        PYLLM_SS("m64n" #N "k16.f32.f16.f16", R, "+f", i0, i1, i2, ", 1, 1, " i3 ", " i4, "l"(a), "l"(b), "r"(keep), "n"(int(TransposeA)), \
                 "n"(int(TransposeB)));                                                                                                    \
      } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {                                                                             \
        static_assert(!TransposeA && !TransposeB, "8-bit operands are K-major");                                                           \
        PYLLM_SS("m64n" #N "k32.f32.e4m3.e4m3", R, "+f", i0, i1, i2, ", 1, 1", "l"(a), "l"(b), "r"(keep));                                 \
      } else {                                                                                                                             \
        static_assert(std::is_same_v<T, int8_t> && !TransposeA && !TransposeB, "bf16, fp16, e4m3 or K-major int8");                        \
        PYLLM_INT8_##N(PYLLM_SS("m64n" #N "k32.s32.s8.s8", R, "+r", i0, i1, i2, "", "l"(a), "l"(b), "r"(keep)));                           \
      }                                                                                                                                    \
    }                                                                                                                                      \
    template <class T, bool TransposeB = false>                                                                                            \
    static __device__ __forceinline__ void rs(float (&d)[R], const uint32_t (&a)[4], uint64_t b, bool accumulate) {                        \
      const int keep = accumulate;                                                                                                         \
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                                                                    \
        PYLLM_RS("m64n" #N "k16.f32.bf16.bf16", R, "+f", i0, i1, i2, i3, i4, i5, ", 1, 1, " i6, PYLLM_A_REGISTERS, "l"(b), "r"(keep),      \
                 "n"(int(TransposeB)));                                                                                                    \
      } else if constexpr (std::is_same_v<T, __half>) {                                                                                    \
        PYLLM_RS("m64n" #N "k16.f32.f16.f16", R, "+f", i0, i1, i2, i3, i4, i5, ", 1, 1, " i6, PYLLM_A_REGISTERS, "l"(b), "r"(keep),        \
                 "n"(int(TransposeB)));                                                                                                    \
      } else {                                                                                                                             \
        static_assert(std::is_same_v<T, __nv_fp8_e4m3> && !TransposeB, "bf16, fp16 or K-major e4m3");                                      \
        PYLLM_RS("m64n" #N "k32.f32.e4m3.e4m3", R, "+f", i0, i1, i2, i3, i4, i5, ", 1, 1", PYLLM_A_REGISTERS, "l"(b), "r"(keep));          \
      }                                                                                                                                    \
    }                                                                                                                                      \
  };

// int8 has fewer widths than the floating types.
#define PYLLM_INT8_8(statement) statement
#define PYLLM_INT8_16(statement) statement
#define PYLLM_INT8_24(statement) statement
#define PYLLM_INT8_32(statement) statement
#define PYLLM_INT8_40(statement) static_assert(!std::is_same_v<T, int8_t>, "no int8 product is 40 wide")
#define PYLLM_INT8_48(statement) statement
#define PYLLM_INT8_56(statement) static_assert(!std::is_same_v<T, int8_t>, "no int8 product is 56 wide")
#define PYLLM_INT8_64(statement) statement
#define PYLLM_INT8_80(statement) statement
#define PYLLM_INT8_96(statement) statement
#define PYLLM_INT8_112(statement) statement
#define PYLLM_INT8_128(statement) statement
#define PYLLM_INT8_144(statement) statement
#define PYLLM_INT8_160(statement) statement
#define PYLLM_INT8_176(statement) statement
#define PYLLM_INT8_192(statement) statement
#define PYLLM_INT8_208(statement) statement
#define PYLLM_INT8_224(statement) statement
#define PYLLM_INT8_240(statement) statement
#define PYLLM_INT8_256(statement) statement

// clang-format off
PYLLM_WGMMA(8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10")
PYLLM_WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
PYLLM_WGMMA(24, 12, "%12", "%13", "%14", "%15", "%16", "%17", "%18")
PYLLM_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
PYLLM_WGMMA(40, 20, "%20", "%21", "%22", "%23", "%24", "%25", "%26")
PYLLM_WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
PYLLM_WGMMA(56, 28, "%28", "%29", "%30", "%31", "%32", "%33", "%34")
PYLLM_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
PYLLM_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
PYLLM_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
PYLLM_WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
PYLLM_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
PYLLM_WGMMA(144, 72, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
PYLLM_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
PYLLM_WGMMA(176, 88, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
PYLLM_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
PYLLM_WGMMA(208, 104, "%104", "%105", "%106", "%107", "%108", "%109", "%110")
PYLLM_WGMMA(224, 112, "%112", "%113", "%114", "%115", "%116", "%117", "%118")
PYLLM_WGMMA(240, 120, "%120", "%121", "%122", "%123", "%124", "%125", "%126")
PYLLM_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
// clang-format on

}  // namespace pyllm
