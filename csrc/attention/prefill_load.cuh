// The producer of prefill: the shape of its shared memory, the warp that walks over the tiles, the warp that brings q, k and v by TMA.
#pragma once
#include "attention/prefill_work.cuh"
#include "common/ptx_sm90.cuh"
#include "common/tensor_map.h"
#include "common/wgmma.cuh"

namespace pyllm::attention {

// Groups: consumer warpgroups. Slots: of q. TakeTurns: warpgroups issue their products in turn. Plain: no window, softcap or mask of bits.
template <class T_, int D_, int Dv_, int N_, int Groups_, int Stages_, int Slots_, bool TakeTurns_, bool InOrder_, bool Plain_>
struct PrefillShape {
  using T = T_;
  static constexpr int D = D_, Dv = Dv_, N = N_, Groups = Groups_, Stages = Stages_, Slots = Slots_, M = 64 * Groups;
  static constexpr int Tiles = 2;  // posted and not yet done
  static constexpr bool TakeTurns = TakeTurns_ && Groups > 1, InOrder = InOrder_, Plain = Plain_;
  static constexpr int Chunk = D % 64 == 0 && Dv % 64 == 0 ? 64 : 32;  // columns of a box: what the swizzle spans
  static constexpr int Row = 2 * Chunk;
  static constexpr int KChunks = D / Chunk, VChunks = Dv / Chunk;
  static constexpr int QBytes = 64 * D * 2, KBytes = N * D * 2, VBytes = N * Dv * 2;
  static constexpr int Threads = 128 * (Groups + 1);
  static constexpr int ProducerRegisters = Groups == 3 ? 32 : Groups == 2 ? 40 : 56;
  static constexpr int ConsumerRegisters = Groups == 3 ? 160 : Groups == 2 ? 232 : 256 - 8;
  static constexpr SmemLayout Layout = Chunk == 64 ? SmemLayout::kSwizzle128 : SmemLayout::kSwizzle64;
  static constexpr Swizzle MapSwizzle = Chunk == 64 ? Swizzle::k128 : Swizzle::k64;
  static_assert(D % Chunk == 0 && Dv % Chunk == 0 && N % 16 == 0 && Dv <= D && N / 16 * KChunks <= 32);

  // Offsets in shared memory, from a multiple of 1024.
  static constexpr int V = Stages * KBytes, Q = V + Stages * VBytes, Barriers = Q + Slots * Groups * QBytes;
  static constexpr int KFull = Barriers, KEmpty = KFull + 8 * Stages, VFull = KEmpty + 8 * Stages, VEmpty = VFull + 8 * Stages,
                       QFull = VEmpty + 8 * Stages, QEmpty = QFull + 8 * Slots, TileFull = QEmpty + 8 * Slots,
                       TileEmpty = TileFull + 8 * Tiles, Bytes = TileEmpty + 8 * Tiles + 1024;
};

// Where a ring of slots stands after `use` uses.
template <int Size>
__device__ __forceinline__ int slot_of(int use) {
  return Size == 1 ? 0 : use % Size;
}
template <int Size>
__device__ __forceinline__ uint32_t parity_of(int use) {
  return use / Size & 1;
}

// The same value in all lanes, said so that the compiler knows it: products must not stand on paths that it thinks divergent.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// One warp walks over the tiles and posts them, as far ahead as there are q slots.
template <class Shape>
__device__ __forceinline__ void walk_tiles(const PrefillAttentionParams& p, uint32_t smem, PrefillTile* tiles, PrefillWalkState* state) {
  const bool chosen = threadIdx.x % 32 == 0;
  PrefillCounter counter(p, chosen);
  int number = blockIdx.x;
  if (p.second) {
    int total = -1;
    if (chosen) number = counter.next(), total = counter.known_total();
    number = uniform(number);
    total = uniform(total);
    if (total >= 0 && number >= total) {
      if (!chosen) return;
      tiles[0] = PrefillTile{.first = -1};
      barrier_arrive(smem + Shape::TileFull);
      return counter.finish(number, total);
    }
  }
  PrefillWalk<Shape::M, Shape::N> walk(p, 2, state);
  for (int round = 0;; ++round) {
    const int slot = slot_of<Shape::Tiles>(round);
    // A number is taken late, so that nobody holds a tile that an idle CTA could start.
    barrier_wait(smem + Shape::TileEmpty + 8 * slot, parity_of<Shape::Tiles>(round) ^ 1);
    if (round > 0) number = uniform(chosen ? counter.next() : 0);
    const auto post = [&](const PrefillTile& tile) {
      tiles[slot] = tile;
      barrier_arrive(smem + Shape::TileFull + 8 * slot);
    };
    const bool more = walk.find(number, post);
    if (!more && chosen) post(PrefillTile{.first = -1});
    if (more) continue;
    if (chosen) {
      if (round == 0 && !p.second) number = counter.next();
      counter.finish(number, walk.total());
    }
    return;
  }
}

// Another warp brings what they need.
template <class Shape>
class PrefillLoader {
 public:
  __device__ __forceinline__ PrefillLoader(const PrefillAttentionParams& p, const CUtensorMap* q, const CUtensorMap* k,
                                           const CUtensorMap* v, int box, uint32_t smem, const PrefillTile* tiles)
      : p_(p), q_(q), k_(k), v_(v), box_(box), smem_(smem), tiles_(tiles), lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    for (int round = 0;; ++round) {
      const int slot = slot_of<Shape::Tiles>(round);
      barrier_wait(smem_ + Shape::TileFull + 8 * slot, parity_of<Shape::Tiles>(round));
      const PrefillTile& tile = tiles_[slot];
      load_rows(tile, round);
      if (tile.first < 0) return;
      load_blocks(tile);
      __syncwarp();
      if (lane_ == 0) barrier_arrive(smem_ + Shape::TileEmpty + 8 * slot);
    }
  }

 private:
  // Without more tiles the barrier only wakes the consumers.
  __device__ __forceinline__ void load_rows(const PrefillTile& tile, int round) {
    const int slot = slot_of<Shape::Slots>(round);
    barrier_wait(smem_ + Shape::QEmpty + 8 * slot, parity_of<Shape::Slots>(round) ^ 1);
    const int groups = tile.first < 0 ? 0 : min(Shape::Groups, (tile.rows - tile.first + 63) / 64);
    const uint32_t full = smem_ + Shape::QFull + 8 * slot;
    if (lane_ == 0) barrier_arrive_expect(full, groups * Shape::QBytes);
    __syncwarp();
    if (lane_ < groups * Shape::KChunks) {
      const int group = lane_ / Shape::KChunks, chunk = lane_ % Shape::KChunks;
      const uint32_t to = smem_ + Shape::Q + (slot * Shape::Groups + group) * Shape::QBytes + chunk * 64 * Shape::Row;
      tma_load(to, q_, full, 0, tile.q_start + tile.first + 64 * group, tile.head, chunk);
    }
  }

  // k runs one block ahead of v, as the consumers need them.
  __device__ __forceinline__ void load_blocks(const PrefillTile& tile) {
    const int kv_head = tile.head / p_.group;
    for (int block = tile.end - 1; block >= tile.low; --block) {
      load<Shape::KBytes, Shape::KChunks>(k_, Shape::KFull, Shape::KEmpty, 0, tile, kv_head, block, use_);
      if (block + 1 < tile.end) {
        load<Shape::VBytes, Shape::VChunks>(v_, Shape::VFull, Shape::VEmpty, Shape::V, tile, kv_head, block + 1, use_ - 1);
      }
      ++use_;
    }
    if (tile.low < tile.end) {
      load<Shape::VBytes, Shape::VChunks>(v_, Shape::VFull, Shape::VEmpty, Shape::V, tile, kv_head, tile.low, use_ - 1);
    }
  }

  template <int Bytes, int Chunks>
  __device__ __forceinline__ void load(const CUtensorMap* map, int full, int empty, int base, const PrefillTile& tile, int kv_head,
                                       int block, int use) {
    const int slot = slot_of<Shape::Stages>(use), segment = lane_ / Chunks, chunk = lane_ % Chunks;
    const int left = tile.length - block * Shape::N, segments = min(Shape::N, left + box_ - 1) / box_;  // boxes that hold a key
    const int key = block * Shape::N + segment * box_;
    const bool mine = segment < segments;
    int row = tile.k_start + key, page = 0;
    if (p_.page_table != nullptr && mine) {
      page = p_.page_table[tile.b * p_.table_stride + (key >> p_.page_shift)];
      row = key & ((1 << p_.page_shift) - 1);
    }
    barrier_wait(smem_ + empty + 8 * slot, parity_of<Shape::Stages>(use) ^ 1);
    if (lane_ == 0) barrier_arrive_expect(smem_ + full + 8 * slot, segments * box_ * (Bytes / Shape::N));
    __syncwarp();
    if (mine) {
      const uint32_t to = smem_ + base + slot * Bytes + chunk * Shape::N * Shape::Row + segment * box_ * Shape::Row;
      tma_load(to, map, smem_ + full + 8 * slot, 0, row, kv_head, chunk, page);
    }
  }

  const PrefillAttentionParams& p_;
  const CUtensorMap *q_, *k_, *v_;
  const int box_;
  const uint32_t smem_;
  const PrefillTile* tiles_;
  const int lane_;
  int use_ = 0;
};

}  // namespace pyllm::attention
