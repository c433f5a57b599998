// Producer side of the FP8 prefill: shared-memory plan, work list, TMA copies, and the turning of V.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "attention/prefill_attention.h"
#include "common/ptx_sm90.cuh"
#include "common/wgmma.cuh"

namespace pyllm::fp8 {

constexpr int kTurn = 2;   // named barriers kTurn, kTurn + 1: whose turn it is to issue products
constexpr int kClear = 4;  // of the turning warps

template <int Stages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
};

// 128 query rows of one head and what they see.
struct Item {
  int rows;      // 1..128; 0 ends the list
  int token;     // first row in q
  int position;  // of the first row
  int keys;      // L
  int head, kv_head, sequence;
  int key_row;                 // contiguous keys: the sequence's first row of k
  int low, high;               // keys that some row sees are in [low, high)
  int first_tile, last_tile;   // of keys; walked from the last to the first
  int plain_from, plain_upto;  // tiles in [from, upto) are unmasked in every row
  int bits_from;               // first key of the custom mask's bits
};

template <int Dim, int Keys, int StagesK, int StagesV, int StagesT, int Chunk = Dim, bool Ahead = false>
struct TileShape {
  static constexpr int kRows = 128, kDim = Dim, kKeys = Keys;
  static constexpr int kStagesK = StagesK, kStagesV = StagesV, kStagesT = StagesT, kItems = 2;
  static constexpr int kBox = Dim < 128 ? Dim : 128;  // bytes of a row of a TMA box
  static constexpr SmemLayout kLayout = kBox == 128 ? SmemLayout::kSwizzle128 : SmemLayout::kSwizzle64;
  static constexpr int kTurned = (Keys + 127) / 128 * 128 * Dim;  // bytes of a tile of V^T: parts of 128 keys, Dim rows of 128 bytes
  static constexpr int kChunk = Chunk;                            // columns of O that one product of P and V covers
  static constexpr bool kWide = Chunk < Dim;                      // see attend_wide
  static constexpr bool kAhead = Ahead;                           // see attend_ahead
  static constexpr int kPageRows = Keys % 128 == 0 ? 128 : Keys % 64 == 0 ? 64 : 32;  // most rows of one copy out of a page
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
};

template <class Tile>
struct Smem {
  uint32_t base;
  uint8_t* generic;

  static constexpr int kQ = 0, kK = kQ + Tile::kRows * Tile::kDim, kV = kK + Tile::kStagesK * Tile::kKeys * Tile::kDim;
  static constexpr int kT = kV + Tile::kStagesV * Tile::kKeys * Tile::kDim, kItem = kT + Tile::kStagesT * Tile::kTurned;
  static constexpr int kBarriers = kItem + Tile::kItems * 64;
  static constexpr int kCount = 2 + 2 * (Tile::kStagesK + Tile::kStagesV + Tile::kStagesT + Tile::kItems);
  static constexpr int kBytes = kBarriers + 8 * kCount;
  static_assert(sizeof(Item) <= 64);

  __device__ __forceinline__ uint32_t q() const { return base + kQ; }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + kK + stage * (Tile::kKeys * Tile::kDim); }
  __device__ __forceinline__ uint32_t v(int stage) const { return base + kV + stage * (Tile::kKeys * Tile::kDim); }
  __device__ __forceinline__ uint32_t t(int stage) const { return base + kT + stage * Tile::kTurned; }
  __device__ __forceinline__ Item* item(int stage) const { return reinterpret_cast<Item*>(generic + kItem + stage * 64); }

  __device__ __forceinline__ uint32_t barrier(int i) const { return base + kBarriers + 8 * i; }
  __device__ __forceinline__ uint32_t full_q() const { return barrier(0); }
  __device__ __forceinline__ uint32_t empty_q() const { return barrier(1); }
  __device__ __forceinline__ uint32_t full_k(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t empty_k(int stage) const { return barrier(2 + Tile::kStagesK + stage); }
  static constexpr int kAtV = 2 + 2 * Tile::kStagesK, kAtT = kAtV + 2 * Tile::kStagesV, kAtItem = kAtT + 2 * Tile::kStagesT;
  __device__ __forceinline__ uint32_t full_v(int stage) const { return barrier(kAtV + stage); }
  __device__ __forceinline__ uint32_t empty_v(int stage) const { return barrier(kAtV + Tile::kStagesV + stage); }
  __device__ __forceinline__ uint32_t full_t(int stage) const { return barrier(kAtT + stage); }
  __device__ __forceinline__ uint32_t empty_t(int stage) const { return barrier(kAtT + Tile::kStagesT + stage); }
  __device__ __forceinline__ uint32_t full_item(int stage) const { return barrier(kAtItem + stage); }
  __device__ __forceinline__ uint32_t empty_item(int stage) const { return barrier(kAtItem + Tile::kItems + stage); }

  // Arrivals: consumers with one lane of each of their 8 warps, the turning warps with one lane of each of 3.
  __device__ __forceinline__ void init() const {
    barrier_init(full_q(), 1), barrier_init(empty_q(), 8);
    for (int i = 0; i < Tile::kStagesK; ++i) barrier_init(full_k(i), 1), barrier_init(empty_k(i), 8);
    for (int i = 0; i < Tile::kStagesV; ++i) barrier_init(full_v(i), 1), barrier_init(empty_v(i), 3);
    for (int i = 0; i < Tile::kStagesT; ++i) barrier_init(full_t(i), 3), barrier_init(empty_t(i), 8);
    for (int i = 0; i < Tile::kItems; ++i) barrier_init(full_item(i), 1), barrier_init(empty_item(i), 11);
    barrier_init_fence();
  }
};

// The items of this CTA, in the order of all items dealt out back and forth, so that neighbours' costs even out. Within a sequence the
// blocks with most keys come first, and the heads of a block follow each other. Sequence B stands for the rows that no sequence owns.
template <int Rows, int Keys>
__device__ __forceinline__ Item find_item(const PrefillAttentionParams& p, int round) {
  const int lane = threadIdx.x % 32;
  const int across = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  int left = round * gridDim.x + across;
  Item item{};
  for (int first = 0; first <= p.batch; first += 32) {
    const int b = first + lane;
    const int start = b <= p.batch ? p.q_starts[b] : 0;
    const int n = b < p.batch ? p.q_starts[b + 1] - start : b == p.batch ? static_cast<int>(p.tokens) - start : 0;
    const int blocks = b < p.batch && n <= p.skip_rows ? 0 : (n + Rows - 1) / Rows;
    int upto = blocks * p.heads;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, upto, step);
      if (lane >= step) upto += other;
    }
    const unsigned after = __ballot_sync(0xffffffff, upto > left);
    if (after == 0) {
      left -= __shfl_sync(0xffffffff, upto, 31);
      continue;
    }
    const int owner = __ffs(after) - 1;
    const int its_blocks = __shfl_sync(0xffffffff, blocks, owner), its_rows = __shfl_sync(0xffffffff, n, owner);
    left -= __shfl_sync(0xffffffff, upto, owner) - its_blocks * p.heads;
    const int block = p.causal ? its_blocks - 1 - left / p.heads : left / p.heads;
    item.sequence = first + owner;
    item.rows = min(Rows, its_rows - block * Rows);
    item.token = __shfl_sync(0xffffffff, start, owner) + block * Rows;
    item.head = left % p.heads;
    item.kv_head = item.head / p.group;
    if (item.sequence < p.batch) {
      item.key_row = p.kv_starts != nullptr ? p.kv_starts[item.sequence] : 0;
      item.keys = p.kv_starts != nullptr ? p.kv_starts[item.sequence + 1] - item.key_row : p.kv_lens[item.sequence];
      item.bits_from = p.mask_starts != nullptr ? p.mask_starts[item.sequence] : item.keys - its_rows;
    }
    item.position = item.keys - its_rows + block * Rows;
    item.low = p.window > 0 ? max(item.position - p.window + 1, 0) : 0;
    item.high = p.causal ? min(item.keys, item.position + item.rows) : item.keys;
    item.plain_from = p.window > 0 ? (max(item.position + item.rows - p.window, 0) + Keys - 1) / Keys : 0;
    int plain = p.causal ? min(item.keys, max(item.position + 1, 0)) : item.keys;
    if (p.mask != nullptr) plain = min(plain, max(item.bits_from, 0));
    item.plain_upto = plain / Keys;
    const bool some = item.high > item.low;
    item.first_tile = some ? item.low / Keys : 0;
    item.last_tile = some ? (item.high - 1) / Keys : -1;
    break;
  }
  return item;
}

// Copies the keys of a tile of k or v that some row sees; whole boxes, so neighbours may come along. All lanes of the warp.
template <class Tile, bool Paged>
__device__ __forceinline__ void copy_tile(const PrefillAttentionParams& p, const CUtensorMap& map, const Item& item, int tile, uint32_t to,
                                          uint32_t full) {
  const int lane = threadIdx.x % 32;
  if constexpr (!Paged) {
    if (lane == 0) {
      barrier_arrive_expect(full, Tile::kKeys * Tile::kDim);
#pragma unroll
      for (int x = 0; x < Tile::kDim; x += Tile::kBox) {
        tma_load(to + x * Tile::kKeys, &map, full, x, item.kv_head, item.key_row + tile * Tile::kKeys);
      }
    }
  } else {
    const int shift = min(p.page_shift, Tile::kPageRows == 128 ? 7 : Tile::kPageRows == 64 ? 6 : 5), rows = 1 << shift;
    const int from = max(item.low - tile * Tile::kKeys, 0) >> shift;
    const int upto = (min(item.high - tile * Tile::kKeys, Tile::kKeys) + rows - 1) >> shift;
    if (lane == 0) barrier_arrive_expect(full, (upto - from) * rows * Tile::kDim);
    __syncwarp();
    if (lane >= from && lane < upto) {
      const int key = tile * Tile::kKeys + lane * rows;
      const int page = p.page_table[item.sequence * p.table_stride + (key >> p.page_shift)];
#pragma unroll
      for (int x = 0; x < Tile::kDim; x += Tile::kBox) {
        tma_load(to + x * Tile::kKeys + lane * rows * Tile::kBox, &map, full, x, item.kv_head, key & ((1 << p.page_shift) - 1), page);
      }
    }
  }
}

template <class Tile, bool Paged>
__device__ __forceinline__ void load(const PrefillAttentionParams& p, const Smem<Tile>& smem, const CUtensorMap& q_map,
                                     const CUtensorMap& k_map, const CUtensorMap& v_map) {
  Ring<Tile::kItems> items;
  Ring<Tile::kStagesK> ks;
  Ring<Tile::kStagesV> vs;
  uint32_t q_phase = 1;
  const int lane = threadIdx.x % 32;
  for (int round = 0;; ++round, items.next()) {
    const Item item = find_item<Tile::kRows, Tile::kKeys>(p, round);
    barrier_wait(smem.empty_item(items.stage), items.phase ^ 1);
    if (lane == 0) {
      *smem.item(items.stage) = item;
      barrier_arrive(smem.full_item(items.stage));
    }
    __syncwarp();
    if (item.rows <= 0) break;
    if (item.last_tile < item.first_tile) continue;
    barrier_wait(smem.empty_q(), q_phase);
    q_phase ^= 1;
    if (lane == 0) {
      barrier_arrive_expect(smem.full_q(), Tile::kRows * Tile::kDim);
#pragma unroll
      for (int x = 0; x < Tile::kDim; x += Tile::kBox) {
        tma_load(smem.q() + x * Tile::kRows, &q_map, smem.full_q(), x, item.head, item.token);
      }
    }
    for (int tile = item.last_tile; tile >= item.first_tile; --tile) {
      barrier_wait(smem.empty_k(ks.stage), ks.phase ^ 1);
      copy_tile<Tile, Paged>(p, k_map, item, tile, smem.k(ks.stage), smem.full_k(ks.stage));
      ks.next();
      barrier_wait(smem.empty_v(vs.stage), vs.phase ^ 1);
      copy_tile<Tile, Paged>(p, v_map, item, tile, smem.v(vs.stage), smem.full_v(vs.stage));
      vs.next();
    }
  }
}

// A block is 32 keys x 16 columns of V, and 16 rows x 32 bytes of V^T; a lane's key is its row of V. Both swizzles are an exclusive or of
// address bits, so a block's addresses are the first one's with its number in place. Two blocks at a time are what the registers hold.
template <class Tile>
struct Turn {
  static constexpr int kChunks = Tile::kBox / 16;
  uint32_t v, t;  // the lane's addresses in the stages at hand

  __device__ __forceinline__ Turn(uint32_t v_tile, uint32_t t_tile) {
    const int lane = threadIdx.x % 32;
    v = v_tile + lane * Tile::kBox + (Tile::kBox == 128 ? lane % 8 : lane / 2 % 4) * 16;
    t = t_tile + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
  }
  static __device__ __forceinline__ void write(const uint32_t (&r)[4], uint32_t to, int keys) {
    const uint32_t out[4] = {__byte_perm(r[0], r[1], 0x6420), __byte_perm(r[0], r[1], 0x7531), __byte_perm(r[2], r[3], 0x6420),
                             __byte_perm(r[2], r[3], 0x7531)};
    store_matrix((to ^ keys % 4 * 32) + keys / 4 * (Tile::kDim * 128), out);
  }
  // Columns warp, warp + 3, ... of 16.
  __device__ __forceinline__ void tile(int warp) const {
#pragma unroll 1
    for (int column = warp; column < Tile::kDim / 16; column += 3) {
      const uint32_t from = (v ^ column % kChunks * 16) + column / kChunks * (Tile::kKeys * Tile::kBox), to = t + column * 2048;
#pragma unroll
      for (int keys = 0; keys < Tile::kKeys / 32; keys += 2) {
        uint32_t r[2][4];
        load_matrix_transposed(r[0], from + keys * (32 * Tile::kBox));
        load_matrix_transposed(r[1], from + (keys + 1) * (32 * Tile::kBox));
        write(r[0], to, keys);
        write(r[1], to, keys + 1);
      }
    }
  }
};

// Rows of a tile of V outside [low, high) become zeros, by the three turning warps together.
template <class Tile>
__device__ __forceinline__ void clear_keys(uint32_t v, int low, int high) {
#pragma unroll 1
  for (int i = threadIdx.x - 32; i < Tile::kKeys * Tile::kDim / 16; i += 96) {
    const int key = i / (Tile::kBox / 16) % Tile::kKeys;
    if (key < low || key >= high) asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + i * 16), "r"(0) : "memory");
  }
  named_sync(kClear, 96);
}

// Warps 0..2 of three. Keys that no row sees become zeros: whatever lies there (NaN in a page's tail) is multiplied with P = 0.
template <class Tile>
__device__ __forceinline__ void turn_values(const Smem<Tile>& smem, int warp) {
  Ring<Tile::kItems> items;
  Ring<Tile::kStagesV> vs;
  Ring<Tile::kStagesT> ts;
  const bool leader = threadIdx.x % 32 == 0;
  for (;; items.next()) {
    barrier_wait(smem.full_item(items.stage), items.phase);
    const Item* item = smem.item(items.stage);
    const int rows = item->rows, low = item->low, high = item->high, first = item->first_tile, last = item->last_tile;
    __syncwarp();
    if (leader) barrier_arrive(smem.empty_item(items.stage));
    if (rows <= 0) break;
    for (int tile = last; tile >= first; --tile) {
      barrier_wait(smem.full_v(vs.stage), vs.phase);
      barrier_wait(smem.empty_t(ts.stage), ts.phase ^ 1);
      const int from = low - tile * Tile::kKeys, upto = high - tile * Tile::kKeys;
      if (from > 0 || upto < Tile::kKeys) clear_keys<Tile>(smem.v(vs.stage), from, upto);
      Turn<Tile>(smem.v(vs.stage), smem.t(ts.stage)).tile(warp);
      fence_async_shared();
      __syncwarp();
      if (leader) barrier_arrive(smem.empty_v(vs.stage)), barrier_arrive(smem.full_t(ts.stage));
      vs.next();
      ts.next();
    }
  }
}

}  // namespace pyllm::fp8
