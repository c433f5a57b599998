// Grouped GEMM, the parts that its roles share: tile shapes, shared memory, the walk over the device's list of tiles.
// grouped_linear.cuh says how they work together.
#pragma once
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/vec.cuh"
#include "common/wgmma.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/grouped_linear.h"
#include "gemm/ring.cuh"

namespace pyllm::grouped {

using gemm::Ring;

constexpr int kSlabBytes = 128;  // of a row: the span of the swizzle

// BX rows of x and Blocks of 64 rows of the weight make a tile; Slabs of 128 bytes of K a stage. First: x by index and gated, the product
// before the activation; otherwise x in order, the one behind it. Ctas share an SM.
template <class T_, class Out_, int BX_, int Blocks_, int Slabs_, int Ctas_, bool First_>
struct Tile {
  using T = T_;
  using Out = Out_;
  static constexpr int BX = BX_, kBlocks = Blocks_, kSlabs = Slabs_, kCtas = Ctas_;
  static constexpr int kRowsW = 64 * kBlocks;
  static constexpr bool kFirst = First_, kScaled = sizeof(T) == 1;
  static constexpr int kItems = kSlabBytes / sizeof(T);  // columns of a slab
  static constexpr int BK = kItems * kSlabs;
  static constexpr int kThreads = 384;  // one warpgroup feeds, two multiply
  static constexpr int R = BX / 2;      // sums per thread and 64 rows of the weight
  static constexpr int kBytesW = kRowsW * kSlabBytes * kSlabs, kBytesX = BX * kSlabBytes * kSlabs;
  static constexpr int kChunkRows = BX < 64 ? BX : 64, kChunkBytes = kChunkRows * 128;  // of one store: 64 columns of the output
  static constexpr int kChunkBuffers = kCtas == 1 ? 2 : 1;
  static constexpr bool kDirect = BX == 8;  // results go from registers to memory: shared memory and TMA would take longer
  static constexpr int kBytesOut = kDirect ? 0 : 2 * kChunkBuffers * kChunkBytes;
  static constexpr int kBytesScales = kScaled ? 2 * BX * 4 : 0;
  static constexpr int kTail = kBytesOut + kBytesScales + 256;  // 256: barriers
  static constexpr int kSmem = kCtas == 1 ? 227 * 1024 : 113 * 1024;
  static constexpr int kFit = (kSmem - kTail) / (kBytesW + kBytesX);
  static constexpr int kStages = kFit > 12 ? 12 : kFit;
  static constexpr int kColumns = kFirst ? kRowsW / 2 : kRowsW;  // of the output
  static constexpr int kCopies = BX * 8 * kSlabs / 128;          // 16-byte pieces of a stage of x per feeding thread
  static constexpr int kOwnRows = BX < 16 ? 1 : BX / 16;         // rows of x that a feeding thread reads
  static constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
  static_assert(kStages >= 3 && kCopies >= 1 && (kDirect || kBlocks == 2));
};

template <class C>
struct Shared {
  uint32_t base;
  __device__ __forceinline__ uint32_t w(int stage) const { return base + stage * C::kBytesW; }
  __device__ __forceinline__ uint32_t x(int stage) const { return base + C::kStages * C::kBytesW + stage * C::kBytesX; }
  __device__ __forceinline__ uint32_t out(int consumer) const { return x(C::kStages) + consumer * (C::kBytesOut / 2); }
  __device__ __forceinline__ uint32_t scales(int consumer) const { return out(2) + consumer * C::BX * 4; }
  __device__ __forceinline__ uint32_t full(int stage) const { return out(2) + C::kBytesScales + 8 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(C::kStages + stage); }
};

struct Args {
  const void* x;
  const int* rows;
  const GroupedTile* tiles;
  const int* count;
  int64_t x_stride;  // bytes
  int max_tiles;
  int n, k;  // rows and columns of one expert's weight
  int act;
  float alpha, limit;
  const float *x_scale, *w_scale;
  const void* bias;
  void* out;  // its first result
};

struct Maps {
  CUtensorMap x, w, y;
};

// Of a thread's rows of the weight (columns of the output): block, half.
template <class C>
struct Columns {
  float scale[C::kBlocks][2], bias[C::kBlocks][2];
};

struct Place {
  int expert, row, end;  // rows of the tile: from `row`, below `end`
  int w;                 // index among the expert's tiles of 128 rows of the weight
};

// What a kernel before this one wrote is read past the L1.
__device__ __forceinline__ int load_past_l1(const int* from) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float load_past_l1(const float* from) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from) : "memory");
  return v;
}

// The tiles of this CTA or, from a `start` and with a `stride`, of one of its warpgroups. The entry of the next one is on its way while a
// tile is worked on. Groups of tiles go along x first, so that tiles in flight share rows of the weight in the L2.
template <class C>
struct Walk {
  const GroupedTile* tiles;
  int tiles_w, total, at, stride, steps;
  int4 next;

  __device__ __forceinline__ Walk(const Args& a, int start, int every) : tiles(a.tiles) {
    tiles_w = (a.n + C::kRowsW - 1) / C::kRowsW;
    steps = (a.k + C::BK - 1) / C::BK;
    stride = gridDim.x * every;
    at = blockIdx.x + gridDim.x * start;
    total = a.max_tiles * tiles_w;
    fetch();  // does not wait for the number of tiles
    total = load_past_l1(a.count) * tiles_w;
  }
  __device__ __forceinline__ void fetch() {
    if (at < total) {
      asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(next.x), "=r"(next.y), "=r"(next.z), "=r"(next.w)
                   : "l"(tiles + at / tiles_w)
                   : "memory");
    }
  }
  // False at the end.
  __device__ __forceinline__ bool take(Place& p) {
    if (at >= total) return false;
    const int first = next.w & 0xFFFFFF, size = static_cast<uint32_t>(next.w) >> 24, inside = at - first * tiles_w;
    p = {next.x, next.y + inside % size * C::BX, next.z, inside / size};
    at += stride;
    fetch();
    return true;
  }
};

__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
// One arrival, once this thread's copies so far have landed.
__device__ __forceinline__ void copy_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Four 8x8 matrices, each stored transposed: lane i gives the address of a row of the stored matrix i / 8.
__device__ __forceinline__ void store_transposed(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

}  // namespace pyllm::grouped
