// Prefill attention on sm_90a: o = softmax(scale q k^T) v over tiles of 64 query rows per warpgroup and blocks of N keys.
//
// One producer warp walks over the tiles (prefill_work.cuh), another brings q, k, v to shared memory by TMA; each consumer warpgroup owns
// 64 rows: S = Q K^T from shared memory, softmax in registers, O += P V with P in registers. Two forms:
// * three warpgroups, each block in order: S, softmax, P V; two warpgroups fill the tensor cores while the third is in its softmax;
// * two warpgroups that issue the next block's S ahead of this block's P V, and take turns at issuing.
// Blocks go from the last key to the first: only the first few need the causal mask.
// Rows of v past a sequence's end are zeroed in shared memory before use: their weights are 0, but 0 * NaN is not.
// Keys come contiguous or by pages through the same boxes of at most min(P, N) rows, so the consumers know no difference.
//
// Shared memory: k and v [Stages][D / Chunk][N][Chunk], q [Slots][Groups][D / Chunk][64][Chunk], all swizzled; the output leaves through
// the q slot of its tile. Floor: the tensor cores. Best measured on an H200, bf16, D = 128, 16k tokens: 647 TFLOP/s full, 658 causal.
// The chain of one warpgroup binds, not the products: beside another warpgroup's products its softmax takes 1,800 cycles, not 1,200.
#pragma once
#include <algorithm>

#include "attention/prefill_softmax.cuh"
#include "attention/prefill_work.cuh"
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/tensor_map.h"
#include "common/wgmma.cuh"

namespace pyllm::attention {

// Groups: consumer warpgroups. Stages: of k and of v. Slots: of q. TakeTurns: warpgroups issue their products in turn. Plain: no window,
// softcap or mask of bits.
template <class T_, int D_, int Dv_, int N_, int Groups_, int Stages_, int Slots_, bool TakeTurns_, bool InOrder_, bool Plain_>
struct PrefillShape {
  using T = T_;
  static constexpr int D = D_, Dv = Dv_, N = N_, Groups = Groups_, Stages = Stages_, Slots = Slots_, M = 64 * Groups;
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
                       Bytes = TileFull + 8 * Slots + 1024;
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

// ---------------------------------------------------------------- producer

// One warp walks over the tiles and posts them, as far ahead as there are q slots.
template <class Shape>
__device__ __forceinline__ void walk_tiles(const PrefillAttentionParams& p, uint32_t smem, PrefillTile* tiles, PrefillWalkState* state) {
  PrefillWalk<Shape::M, Shape::N> walk(p, 2, state);
  const bool chosen = threadIdx.x % 32 == 0;
  PrefillCounter counter(p, chosen);
  for (int round = 0, number = blockIdx.x;; ++round) {
    const int slot = slot_of<Shape::Slots>(round);
    const uint32_t empty = smem + Shape::QEmpty + 8 * slot, parity = parity_of<Shape::Slots>(round) ^ 1;
    // A number is taken late, so that nobody holds a tile that an idle CTA could start; with one slot there is no time for that.
    if (Shape::Slots > 1) barrier_wait(empty, parity);
    if (round > 0) number = uniform(chosen ? counter.next() : 0);
    if (Shape::Slots == 1) barrier_wait(empty, parity);
    const auto post = [&](const PrefillTile& tile) {
      tiles[slot] = tile;
      barrier_arrive(smem + Shape::TileFull + 8 * slot);
    };
    const bool more = walk.find(number, post);
    if (!more && chosen) post(PrefillTile{.first = -1});
    if (more) continue;
    if (chosen) {
      if (round == 0) number = counter.next();
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
      const int slot = slot_of<Shape::Slots>(round);
      barrier_wait(smem_ + Shape::TileFull + 8 * slot, parity_of<Shape::Slots>(round));
      const PrefillTile& tile = tiles_[slot];
      load_rows(tile, slot);
      if (tile.first < 0) return;
      load_blocks(tile);
    }
  }

 private:
  // Without more tiles the barrier only wakes the consumers.
  __device__ __forceinline__ void load_rows(const PrefillTile& tile, int slot) {
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

// ---------------------------------------------------------------- consumers

template <class Shape>
class PrefillConsumer {
 public:
  __device__ __forceinline__ PrefillConsumer(const PrefillAttentionParams& p, uint32_t smem, const PrefillTile* tiles)
      : p_(p),
        smem_(smem),
        tiles_(tiles),
        group_(uniform(threadIdx.x / 128) - 1),
        warp_(uniform(threadIdx.x / 32 % 4)),
        lane_(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (Shape::TakeTurns && group_ == Shape::Groups - 1) named_arrive(1, 256);
    for (int round = 0;; ++round) {
      const int slot = slot_of<Shape::Slots>(round);
      barrier_wait(smem_ + Shape::QFull + 8 * slot, parity_of<Shape::Slots>(round));
      const PrefillTile& tile = tiles_[slot];  // stays there until this warpgroup releases its q slot
      if (tile.first < 0) break;
      one_tile(tile, slot);
    }
  }

 private:
  static constexpr int kScores = Shape::N / 2, kValues = Shape::Dv / 2;
  using T = typename Shape::T;

  __device__ __forceinline__ void one_tile(const PrefillTile& tile, int slot) {
    first_ = tile.first + 64 * group_;
    length_ = tile.length;
    position_ = length_ - tile.rows + first_;
    int end = tile.end, low = tile.low;
    if (first_ >= tile.rows) {
      end = low;
    } else {
      if (p_.causal) end = max(low, min(end, (min(length_, position_ + 64) + Shape::N - 1) / Shape::N));
      if (!Shape::Plain && p_.window > 0) low = min(end, max(low, (position_ - p_.window + 1) / Shape::N));
    }
    end = uniform(end);
    low = uniform(low);
    RowSoftmax softmax;
    float o[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) o[i] = 0.f;

    skip(tile.end - end, end > low ? tile.end - end : tile.end - end - 1);
    if constexpr (Shape::InOrder) {
      blocks_in_order(tile, slot, low, end, softmax, o);
    } else {
      if (end > low) blocks(tile, slot, low, end, softmax, o);
    }
    skip(low - tile.low, low - tile.low);
    store(tile, slot, softmax, o);
  }

  // Blocks that this warpgroup's rows do not see: their slots are released, and the turns passed on.
  __device__ __forceinline__ void skip(int count, int turns) {
    for (int i = 0; i < count; ++i, ++use_) {
      if (i < turns) {
        begin_turn();
        end_turn();
      }
      barrier_wait(full(Shape::KFull, use_), parity_of<Shape::Stages>(use_));
      release(Shape::KEmpty, use_);
      barrier_wait(full(Shape::VFull, use_), parity_of<Shape::Stages>(use_));
      release(Shape::VEmpty, use_);
    }
  }

  // The scores of the next block are issued ahead of the values of this one.
  __device__ __forceinline__ void blocks(const PrefillTile& tile, int slot, int low, int end, RowSoftmax& softmax, float (&o)[kValues]) {
    const float scale = !Shape::Plain && p_.softcap > 0.f ? 1.f : p_.scale * kLog2E;
    const uint64_t q = rows_of(slot);
    const bool tail = end * Shape::N > length_;
    float factor[2];
    uint32_t w[kScores / 2];
    {
      float s[kScores];
      wait_full(Shape::KFull, use_, false);
      issue_scores(s, q, use_);
      wgmma_wait<0>();
      wgmma_pin(s);
      release(Shape::KEmpty, use_);
      mask(tile, end - 1, s);
      softmax.raise(s, scale, factor);
      softmax.weigh<T>(s, scale, w);
    }
    bool k_here = false, v_here = false;
    for (int block = end - 2; block >= low; --block, ++use_) {
      float s[kScores];
      wait_full(Shape::KFull, use_ + 1, k_here);
      begin_turn();
      issue_scores(s, q, use_ + 1);
      wait_full(Shape::VFull, use_, v_here);
      if (tail && block == end - 2) zero_tail(length_ - (end - 1) * Shape::N);
      issue_values(o, w, use_);
      end_turn();
      wgmma_wait<1>();
      wgmma_pin(s);
      release(Shape::KEmpty, use_ + 1);
      mask(tile, block, s);
      const bool raised = softmax.raise(s, scale, factor);
      k_here = is_full(Shape::KFull, use_ + 2);
      v_here = is_full(Shape::VFull, use_ + 1);
      if (raised) {  // a branch, or ptxas moves the wait ahead of the search for the maximum
        wgmma_wait<0>();
        wgmma_pin(o);
        rescale(o, factor);
      }
      wgmma_wait<0>();
      wgmma_pin(o);
      wgmma_pin(w);
      release(Shape::VEmpty, use_);
      softmax.weigh<T>(s, scale, w);
    }
    wait_full(Shape::VFull, use_, v_here);
    if (tail && end - 1 == low) zero_tail(length_ - low * Shape::N);
    issue_values(o, w, use_);
    wgmma_wait<0>();
    wgmma_pin(o);
    release(Shape::VEmpty, use_);
    ++use_;
  }

  // Scores, weights and values of a block one after the other: the other warpgroups fill the tensor cores meanwhile.
  __device__ __forceinline__ void blocks_in_order(const PrefillTile& tile, int slot, int low, int end, RowSoftmax& softmax,
                                                  float (&o)[kValues]) {
    const float scale = !Shape::Plain && p_.softcap > 0.f ? 1.f : p_.scale * kLog2E;
    const uint64_t q = rows_of(slot);
    const bool tail = end * Shape::N > length_;
    bool k_here = false;
    int block = end - 1;
    // A causal warpgroup may need only the first half of its last block of keys.
    const int needed = (p_.causal ? min(length_, position_ + 64) : length_) - block * Shape::N;
    if (Shape::N % 32 == 0 && block >= low && needed <= Shape::N / 2) {
      one_block<Shape::N / 2>(tile, block, q, scale, tail, k_here, softmax, o);
      --block;
    }
    for (; block >= low; --block) one_block<Shape::N>(tile, block, q, scale, tail && block == end - 1, k_here, softmax, o);
  }

  template <int Width>
  __device__ __forceinline__ void one_block(const PrefillTile& tile, int block, uint64_t q, float scale, bool tail, bool& k_here,
                                            RowSoftmax& softmax, float (&o)[kValues]) {
    float s[Width / 2], factor[2];
    uint32_t w[Width / 4];
    wait_full(Shape::KFull, use_, k_here);
    issue_scores(s, q, use_);
    wgmma_wait<0>();
    wgmma_pin(s);
    release(Shape::KEmpty, use_);
    mask(tile, block, s);
    if (softmax.raise(s, scale, factor)) rescale(o, factor);
    const bool v_here = is_full(Shape::VFull, use_);
    k_here = is_full(Shape::KFull, use_ + 1);
    softmax.weigh<T>(s, scale, w);
    wait_full(Shape::VFull, use_, v_here);
    if (tail) zero_tail(length_ - block * Shape::N);
    issue_values(o, w, use_);
    wgmma_wait<0>();
    wgmma_pin(o);
    release(Shape::VEmpty, use_);
    ++use_;
  }

  __device__ __forceinline__ static void rescale(float (&o)[kValues], const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) o[i] *= factor[i / 2 % 2];
  }

  // The q slot of this warpgroup.
  __device__ __forceinline__ uint64_t rows_of(int slot) const {
    return smem_descriptor<Shape::Layout>(smem_ + Shape::Q + (slot * Shape::Groups + group_) * Shape::QBytes, 8 * Shape::Row);
  }
  // Asked for early, so that the answer is there when the products are to be issued.
  __device__ __forceinline__ bool is_full(int offset, int use) const {
    return barrier_try_wait(full(offset, use), parity_of<Shape::Stages>(use));
  }
  __device__ __forceinline__ void wait_full(int offset, int use, bool known) const {
    if (!__all_sync(0xffffffffu, known)) barrier_wait(full(offset, use), parity_of<Shape::Stages>(use));
  }
  template <int Size>
  __device__ __forceinline__ void issue_scores(float (&s)[Size], uint64_t q, int use) {
    wgmma_fence();
    scores(s, q, use);
    wgmma_commit();
  }
  template <int Size>
  __device__ __forceinline__ void issue_values(float (&o)[kValues], const uint32_t (&w)[Size], int use) {
    wgmma_fence();
    values(o, w, use);
    wgmma_commit();
  }

  template <int Size>
  __device__ __forceinline__ void scores(float (&s)[Size], uint64_t q, int use) {
    const uint64_t k = smem_descriptor<Shape::Layout>(smem_ + slot_of<Shape::Stages>(use) * Shape::KBytes, 8 * Shape::Row);
#pragma unroll
    for (int i = 0; i < Shape::D / 16; ++i) {
      const int chunk = i / (Shape::Chunk / 16), within = i % (Shape::Chunk / 16) * 32;
      Wgmma<2 * Size>::template ss<T>(s, descriptor_step(q, chunk * 64 * Shape::Row + within),
                                      descriptor_step(k, chunk * Shape::N * Shape::Row + within), i > 0);
    }
  }
  template <int Size>
  __device__ __forceinline__ void values(float (&o)[kValues], const uint32_t (&w)[Size], int use) {
    const uint64_t v = smem_descriptor<Shape::Layout>(smem_ + Shape::V + slot_of<Shape::Stages>(use) * Shape::VBytes, 8 * Shape::Row,
                                                      Shape::N * Shape::Row);
#pragma unroll
    for (int i = 0; i < Size / 4; ++i) {
      const uint32_t a[4] = {w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]};
      Wgmma<Shape::Dv>::template rs<T, true>(o, a, descriptor_step(v, i * 16 * Shape::Row), true);
    }
  }
  template <int Size>
  __device__ __forceinline__ void mask(const PrefillTile& tile, int block, float (&s)[Size]) {
    const int key = block * Shape::N;
    const bool late = key + Shape::N > length_ || (p_.causal && key + Shape::N - 1 > position_);
    if constexpr (Shape::Plain) {
      if (!late) return;
      int lane;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // asked for here, or the rows' ends are kept in registers through all blocks
      const int row = position_ + 16 * warp_ + lane / 4;
      mask_columns(s, {(p_.causal ? min(length_, row + 1) : length_) - key, (p_.causal ? min(length_, row + 9) : length_) - key});
    } else {
      const int row = position_ + 16 * warp_ + lane_ / 4;
      const int end[2] = {(p_.causal ? min(length_, row + 1) : length_) - key, (p_.causal ? min(length_, row + 9) : length_) - key};
      if (p_.softcap > 0.f) soft_cap(s, p_.scale, p_.softcap);
      const bool early = p_.window > 0 && key <= position_ + 63 - p_.window;
      if (early) {
        mask_columns(s, {row - p_.window + 1 - key, row - p_.window + 9 - key}, end);
      } else if (late) {
        mask_columns(s, end);
      }
      if (p_.mask != nullptr) mask_tree(tile, key, s);
    }
  }
  template <int Size>
  __device__ __forceinline__ void mask_tree(const PrefillTile& tile, int key, float (&s)[Size]) {
    const int begin = p_.mask_starts != nullptr ? p_.mask_starts[tile.b] : length_ - tile.rows;
    if (key + Shape::N <= begin || key >= begin + 32 * p_.mask_words) return;
    MaskRow rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int at = min(first_ + 16 * warp_ + lane_ / 4 + 8 * h, tile.rows - 1);
      rows[h] = {p_.mask + (tile.q_start + at) * p_.mask_stride, begin, p_.mask_words};
    }
    mask_bits(s, key, rows);
  }

  // Rows of the v block in use from `keys` on, by all warps of this warpgroup; others may write the same zeros.
  __device__ __forceinline__ void zero_tail(int keys) {
    const uint32_t v = smem_ + Shape::V + slot_of<Shape::Stages>(use_) * Shape::VBytes;
    constexpr int kPieces = Shape::Row / 16;
    for (int i = threadIdx.x % 128; i < Shape::VChunks * (Shape::N - keys) * kPieces; i += 128) {
      const int chunk = i / ((Shape::N - keys) * kPieces), within = i % ((Shape::N - keys) * kPieces);
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(v + (chunk * Shape::N + keys) * Shape::Row + within * 16), "r"(0)
                   : "memory");
    }
    fence_async_shared();
    named_sync(4 + group_, 128);
  }

  // Through the tile's q slot, whose rows nobody else uses: 16-byte pieces of whole rows, only rows that exist.
  __device__ __forceinline__ void store(const PrefillTile& tile, int slot, RowSoftmax& softmax, float (&o)[kValues]) {
    const uint32_t staged = smem_ + Shape::Q + (slot * Shape::Groups + group_) * Shape::QBytes;
    const float* sink = p_.sinks != nullptr ? p_.sinks + tile.head : nullptr;
    const int rows = tile.rows - first_;
    float lse[2], factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = softmax.finish(h, sink, lse[h]);
      const int row = 16 * warp_ + lane_ / 4 + 8 * h;
      if (p_.lse != nullptr && lane_ % 4 == 0 && row < rows) {
        p_.lse[(static_cast<int64_t>(tile.q_start) + first_ + row) * p_.heads + tile.head] = lse[h];
      }
    }
    named_sync(4 + group_, 128);  // all four warps are done with q
    const int row = 16 * warp_ + lane_ % 16;
#pragma unroll
    for (int i = 0; i < kValues; i += 8) {
      const uint32_t r[4] = {pack<T>(o[i] * factor[0], o[i + 1] * factor[0]), pack<T>(o[i + 2] * factor[1], o[i + 3] * factor[1]),
                             pack<T>(o[i + 4] * factor[0], o[i + 5] * factor[0]), pack<T>(o[i + 6] * factor[1], o[i + 7] * factor[1])};
      store_matrix(staged_piece(staged, row, i / 4 + lane_ / 16), r);
    }
    named_sync(4 + group_, 128);
    constexpr int kPieces = Shape::Dv / 8;
    auto* out = static_cast<uint4*>(p_.out);
#pragma unroll
    for (int i = 0; i < kPieces / 2; ++i) {
      const int at = threadIdx.x % 128 + 128 * i, r = at / kPieces, piece = at % kPieces;
      uint4 x;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                   : "r"(staged_piece(staged, r, piece))
                   : "memory");
      if (r < rows) out[((static_cast<int64_t>(tile.q_start) + first_ + r) * p_.heads + tile.head) * kPieces + piece] = x;
    }
    fence_async_shared();
    __syncwarp();
    if (lane_ == 0) barrier_arrive(smem_ + Shape::QEmpty + 8 * slot);
  }
  // Where 8 values of a row stand: swizzled like a box, so that neither rows nor columns meet in one bank.
  __device__ __forceinline__ static uint32_t staged_piece(uint32_t staged, int row, int piece) {
    constexpr int kPieces = Shape::Row / 16;
    const int swizzle = Shape::Chunk == 64 ? row & 7 : row >> 1 & 3;
    return staged + piece / kPieces * 64 * Shape::Row + row * Shape::Row + (piece % kPieces ^ swizzle) * 16;
  }

  __device__ __forceinline__ uint32_t full(int offset, int use) const { return smem_ + offset + 8 * slot_of<Shape::Stages>(use); }
  __device__ __forceinline__ void release(int offset, int use) {
    if (lane_ == 0) barrier_arrive(full(offset, use));
  }
  __device__ __forceinline__ void begin_turn() {
    if constexpr (Shape::TakeTurns) named_sync(1 + group_, 256);
  }
  __device__ __forceinline__ void end_turn() {
    if constexpr (Shape::TakeTurns) named_arrive(group_ + 1 == Shape::Groups ? 1 : 2 + group_, 256);
  }

  const PrefillAttentionParams& p_;
  const uint32_t smem_;
  const PrefillTile* tiles_;
  const int group_, warp_, lane_;
  int use_ = 0, first_ = 0, position_ = 0, length_ = 0;
};

// Rows of q that belong to no sequence, by all CTAs.
template <class Shape>
__device__ __forceinline__ void clear_rows(const PrefillAttentionParams& p) {
  const int64_t from = p.q_starts[p.batch] * static_cast<int64_t>(p.heads), to = p.tokens * p.heads;
  constexpr int kPieces = Shape::Dv / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * Shape::Threads,
                mine = static_cast<int64_t>(blockIdx.x) * Shape::Threads + threadIdx.x;
  for (int64_t i = from * kPieces + mine; i < to * kPieces; i += step) static_cast<uint4*>(p.out)[i] = uint4{0, 0, 0, 0};
  if (p.lse == nullptr) return;
  for (int64_t i = from + mine; i < to; i += step) p.lse[i] = -INFINITY;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::Threads, 1)
    prefill_kernel(const __grid_constant__ PrefillAttentionParams p, const __grid_constant__ CUtensorMap q,
                   const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v, const int box) {
  extern __shared__ uint8_t raw[];
  __shared__ PrefillTile tiles[Shape::Slots];
  __shared__ PrefillWalkState state;  // static, so that their addresses take no register of the producer
  const uint32_t smem = (smem_address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch_map(&q);
    prefetch_map(&k);
    prefetch_map(&v);
    for (int i = 0; i < Shape::Stages; ++i) {
      barrier_init(smem + Shape::KFull + 8 * i, 1);
      barrier_init(smem + Shape::VFull + 8 * i, 1);
      barrier_init(smem + Shape::KEmpty + 8 * i, 4 * Shape::Groups);
      barrier_init(smem + Shape::VEmpty + 8 * i, 4 * Shape::Groups);
    }
    for (int i = 0; i < Shape::Slots; ++i) {
      barrier_init(smem + Shape::TileFull + 8 * i, 1);
      barrier_init(smem + Shape::QFull + 8 * i, 1);
      barrier_init(smem + Shape::QEmpty + 8 * i, 4 * Shape::Groups);
    }
    barrier_init_fence();
    fence_async_shared();
  }
  __syncthreads();
  if (!p.beside) pdl_wait();
  clear_rows<Shape>(p);
  if (threadIdx.x < 128) {
    registers_down<Shape::ProducerRegisters>();
    if (threadIdx.x < 32) {
      PrefillLoader<Shape>(p, &q, &k, &v, box, smem, tiles).run();
      pdl_trigger();
    } else if (threadIdx.x < 64) {
      walk_tiles<Shape>(p, smem, tiles, &state);
    } else if (p.beside) {
      pdl_wait();  // who waits for this kernel has waited for the one before it
    }
  } else {
    registers_up<Shape::ConsumerRegisters>();
    PrefillConsumer<Shape>(p, smem, tiles).run();
  }
}

// The largest power of two that divides both a page and a block.
inline int box_rows(const PrefillAttentionParams& p, int block) {
  if (p.page_table == nullptr) return block;
  int rows = 1;
  while (rows < 1 << p.page_shift && block % (2 * rows) == 0) rows *= 2;
  return rows;
}

template <class Shape>
CUtensorMap keys_map(const PrefillAttentionParams& p, const char* name, const void* base, int dim, int64_t token, int64_t head,
                     int64_t page, int box) {
  const bool paged = p.page_table != nullptr;
  const int64_t rows = paged ? int64_t{1} << p.page_shift : p.key_rows;
  return make_tensor_map<5>(name, base != nullptr ? base : p.q, p.dtype,
                            {Shape::Chunk, rows, p.kv_heads, dim / Shape::Chunk, paged ? p.key_rows : 1},
                            {token, head, Shape::Chunk, paged ? page : rows * token}, {Shape::Chunk, box, 1, 1, 1}, Shape::MapSwizzle,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// What the shapes without the code for other masks serve.
inline bool is_plain(const PrefillAttentionParams& p) { return p.window == 0 && p.softcap == 0.f && p.mask == nullptr; }

template <class Shape>
void launch_prefill(PrefillAttentionParams p, cudaStream_t stream) {
  p.launch = next_prefill_launch();
  const int box = box_rows(p, Shape::N);
  const CUtensorMap q = make_tensor_map<4>("q", p.q, p.dtype, {Shape::Chunk, p.tokens, p.heads, Shape::KChunks},
                                           {p.q_token_stride, p.q_head_stride, Shape::Chunk}, {Shape::Chunk, 64, 1, 1}, Shape::MapSwizzle);
  const CUtensorMap k = keys_map<Shape>(p, "k", p.k, Shape::D, p.k_token_stride, p.k_head_stride, p.k_page_stride, box);
  const CUtensorMap v = keys_map<Shape>(p, "v", p.v, Shape::Dv, p.v_token_stride, p.v_head_stride, p.v_page_stride, box);
  int device = 0, sms = 0;
  check_launch(cudaGetDevice(&device), "prefill_attention");
  check_launch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "prefill_attention");
  const int64_t most = (p.tokens / Shape::M + std::min<int64_t>(p.batch, p.tokens)) * p.heads;
  if (most >= 1 << kCountBits) throw std::runtime_error("prefill_attention: q has more than 2^24 tiles, expected fewer tokens or heads");
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(std::max<int64_t>(1, std::min<int64_t>(sms, most)))),
                          .block = dim3(Shape::Threads),
                          .smem = Shape::Bytes};
  launch("prefill_attention", shape, stream, prefill_kernel<Shape>, p, q, k, v, box);
}

}  // namespace pyllm::attention
