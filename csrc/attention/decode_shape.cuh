// The sizes of one decode kernel, the layout of a step in shared memory, and conversions between its types.
#pragma once
#include <cuda_fp8.h>

#include <type_traits>

#include "attention/decode_work.cuh"
#include "attention/mma.cuh"
#include "common/vec.cuh"

namespace pyllm::attention {

constexpr int kMaxClusterShift = 3;  // 2^3 CTAs: larger clusters leave more SMs idle, since few fit into a GPC beside each other
constexpr int kMaxCluster = 1 << kMaxClusterShift;
constexpr int kRingBytes = 96 * 1024;  // in flight per SM; more only lengthens the queue at the memory, less starves it
constexpr int kSmBytes = 228 * 1024;   // of shared memory
constexpr int kNarrow = 128;           // up to this D a CTA has 8 warps, and can hold two row tiles
constexpr int decode_warps(int dim) { return dim > kNarrow ? 4 : 8; }  // of an SM
// CTAs to an SM where there are more segments than SMs: while one joins its warps the other one reads.
constexpr int decode_ctas(int dim, int row_tiles) { return row_tiles == 1 && (dim == 64 || dim == 128) ? 2 : 1; }
constexpr int kStreamWarps = 8;  // to an SM, where each warp is a worker (decode_stream.cuh)

// Stored: of the caches. What is one byte wide is computed in fp16, whatever q is: such kernels learn q's dtype at run time.
// Ctas: of an SM, between which warps and ring are shared out.
template <class Stored, int Dim, int RowTiles, int Ctas = 1>
struct DecodeShape {
  using Cache = Stored;
  static constexpr int kDim = Dim, kRowTiles = RowTiles, kCtas = Ctas, kWarps = decode_warps(Dim) / Ctas, kThreads = kWarps * 32;
  static constexpr bool kWide = sizeof(Cache) == 1;                        // widened to fp16 in registers
  using Math = std::conditional_t<kWide, __half, Cache>;                   // of the mma
  static constexpr int kRowBytes = Dim * static_cast<int>(sizeof(Cache));  // of one key
  static constexpr int kChunks = kRowBytes / 16;                           // of 16 bytes
  // Chunks from row to row: rows whose chunk count is no power of two are padded to an odd one instead of swizzled.
  static constexpr int kPitch = (kChunks & (kChunks - 1)) == 0 ? kChunks : kChunks | 1;
  static constexpr bool kSplit = false;         // whether halves of 128 bytes of all rows of a step lie one behind the other
  static constexpr int kTiles = kWide ? 2 : 1;  // of 16 keys in a step: bytes cost twice the instructions, two tiles share some
  static constexpr int kStepKeys = kTiles * kTileKeys;
  static constexpr int kHalf = kStepKeys * kPitch * 16;  // bytes of the keys of a step, or of its values: a slot of the ring
  static constexpr int kBlocks = Dim / 16;               // 16-dimension blocks
  static constexpr int kQuads = kBlocks * 32;            // float4 of an 8-row tile of outputs
  static constexpr int kMerge = (kWarps * kQuads + kWarps * 4 + kQuads + 8 * kMaxCluster + 1) * 16;  // MergeShared, behind the ring
  static constexpr int kSlots = kRingBytes / (Ctas * kWarps * kHalf);
  static constexpr int kRing = kWarps * kSlots * kHalf;
  // As much as lets Ctas into an SM and no more: with room for another, CTAs of the next launch come in twos to the SMs that end first,
  // and equal workers take unequal time (FP8, B = 32, 4k keys: 87 instead of 69 us).
  static constexpr int kShare = (kSmBytes / Ctas - 1280) / 16 * 16;  // a CTA takes 1 KiB besides, and some static memory
  static constexpr int kSmem = Ctas == 1 ? kRing + kMerge : kShare;
  static_assert(kRing + kMerge <= kShare);
  // fp16 weights are kept 2^8 larger: those down to 2^-22 of the largest stay normal numbers.
  static constexpr float kLift = std::is_same_v<Math, __half> ? 8.f : 0.f;
  static_assert(kSlots >= 2 && Dim % 16 == 0);
};

template <class S>
__device__ __forceinline__ bool is_bf16(const DecodeAttentionParams& p) {
  if constexpr (S::kWide) return p.dtype == DType::kBF16;
  return std::is_same_v<typename S::Cache, __nv_bfloat16>;
}

// Where chunk `chunk` of row `row` lies: 8 rows of one chunk, as ldmatrix reads them, fall into different banks.
template <class S>
__device__ __forceinline__ int place_of(int row, int chunk) {
  if constexpr (S::kSplit) return ((chunk / 8 * S::kStepKeys + row) * 8 + (chunk % 8 ^ (row & 7))) * 16;
  if constexpr (S::kPitch != S::kChunks) return (row * S::kPitch + chunk) * 16;
  return (row * S::kChunks + (S::kChunks >= 8 ? chunk ^ (row & 7) : chunk ^ ((row / 2) & 3))) * 16;
}

__device__ __forceinline__ uint32_t bits_of(__half2 h) { return *reinterpret_cast<const uint32_t*>(&h); }
__device__ __forceinline__ uint32_t pack_pair(float lo, float hi, __half) { return bits_of(__floats2half2_rn(lo, hi)); }
__device__ __forceinline__ uint32_t pack_pair(float lo, float hi, __nv_bfloat16) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&h);
}
// Two bf16 to two fp16, clamped.
__device__ __forceinline__ uint32_t to_half_pair(uint32_t two) {
  uint32_t halves;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(__uint_as_float(two & 0xffff0000u)), "f"(__uint_as_float(two << 16)));
  return halves;
}

// Bytes I and J of four as two fp16, exactly. For s8: u = x + 128 in the mantissa of 1024 + u, minus 1152.
template <class Cache, int I, int J>
__device__ __forceinline__ uint32_t widen(uint32_t four) {
  if constexpr (std::is_same_v<Cache, __nv_fp8_e4m3>) {
    const uint32_t two = J == I + 1 ? four >> (8 * I) : __byte_perm(four, 0, I | J << 4);
    const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return static_cast<uint32_t>(h.x) | static_cast<uint32_t>(h.y) << 16;
  } else {
    const uint32_t lifted = __byte_perm(four ^ 0x80808080u, 0x64646464u, 0x4040 | I | J << 8);
    return bits_of(__hsub2(*reinterpret_cast<const __half2*>(&lifted), __floats2half2_rn(1152.f, 1152.f)));
  }
}

}  // namespace pyllm::attention
