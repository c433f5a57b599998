// Prefill attention on sm_90a: o = softmax(scale q k^T) v over tiles of 64 query rows per warpgroup and blocks of N keys.
//
// One producer warp walks over the tiles (prefill_work.cuh), another brings q, k, v to shared memory by TMA (prefill_load.cuh); each
// consumer warpgroup owns 64 rows: S = Q K^T from shared memory, softmax in registers, O += P V with P in registers. Two forms:
// * three warpgroups, each block in order: S, softmax, P V; two warpgroups fill the tensor cores while the third is in its softmax. Once
//   all rows have a reference exponent, blocks are not searched for a maximum: the sums of their weights tell whether one outgrew it;
// * two warpgroups that issue the next block's S ahead of this block's P V, and may take turns at issuing.
// Blocks go from the last key to the first: only the first few need the causal mask.
// Rows of v past a sequence's end are zeroed in shared memory before use: their weights are 0, but 0 * NaN is not.
// Keys come contiguous or by pages through the same boxes of at most min(P, N) rows, so the consumers know no difference.
//
// Shared memory: k and v [Stages][D / Chunk][N][Chunk], q [Slots][Groups][D / Chunk][64][Chunk], all swizzled. The output leaves from
// registers, so that a q slot is free, and the next tile's rows on their way, as soon as the last scores are there.
// Floor: the tensor cores. Measured on an H200, bf16, D = 128, 16k tokens: 782 TFLOP/s full (sequences of 8k), 742 causal (one sequence).
#pragma once
#include <algorithm>

#include "attention/prefill_load.cuh"
#include "attention/prefill_softmax.cuh"
#include "common/launch.h"

namespace pyllm::attention {

// Whether `x` holds in any of the 128 threads of a named barrier.
__device__ __forceinline__ bool named_any(int id, bool x) {
  int any;
  asm volatile("{\n.reg .pred one, all;\nsetp.ne.b32 one, %1, 0;\nbar.red.or.pred all, %2, 128, one;\nselp.b32 %0, 1, 0, all;\n}"
               : "=r"(any)
               : "r"(static_cast<int>(x)), "r"(id)
               : "memory");
  return any != 0;
}

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
      const PrefillTile& tile = tiles_[slot_of<Shape::Tiles>(round)];
      if (tile.first < 0) break;
      one_tile(tile, slot);
      __syncwarp();
      if (lane_ == 0) barrier_arrive(smem_ + Shape::TileEmpty + 8 * slot_of<Shape::Tiles>(round));
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

    if constexpr (Shape::InOrder) {
      skip_in_order(tile.end - end);
      begin_turn();
      blocks_in_order(tile, slot, low, end, softmax, o);
      end_turn();
      if (end <= low) release_rows(slot);
      skip_in_order(low - tile.low);
    } else {
      skip(tile.end - end, end > low ? tile.end - end : tile.end - end - 1);
      if (end > low) blocks(tile, slot, low, end, softmax, o);
      if (end <= low) release_rows(slot);
      skip(low - tile.low, low - tile.low);
    }
    store(tile, softmax, o);
  }

  // Blocks that this warpgroup's rows do not see: their slots are released, and the turns passed on.
  __device__ __forceinline__ void skip(int count, int turns) {
    for (int i = 0; i < count; ++i, ++use_) {
      if (i < turns) {
        begin_turn();
        end_turn();
      }
      wait_full(Shape::KFull, use_, false);
      release(Shape::KEmpty, use_);
      wait_full(Shape::VFull, use_, false);
      release(Shape::VEmpty, use_);
    }
  }

  // The same in order: one turn a block, besides the one of the tile's first scores. The slots go before the turn, since whoever has it
  // may wait for them.
  __device__ __forceinline__ void skip_in_order(int count) {
    for (int i = 0; i < count; ++i) {
      skip(1, 0);
      begin_turn();
      end_turn();
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
      if (end - 1 == low) release_rows(slot);
      mask(tile, end - 1, s);
      softmax.raise(s, scale, factor);
      softmax.weigh<T>(s, scale, w, softmax.sum);
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
      if (block == low) release_rows(slot);
      mask(tile, block, s);
      const bool raised = softmax.raise(s, scale, factor);
      // With turns, the other warpgroup's products hide the exponentials; without, this warpgroup's own do.
      if constexpr (!Shape::TakeTurns) softmax.exponentiate(s, scale);
      k_here = is_full(Shape::KFull, use_ + 2);
      v_here = is_full(Shape::VFull, use_ + 1);
      if (softmax.sum[0] < 0.f) {  // never, but ptxas would move the wait ahead of what the sum depends on
        wgmma_wait<0>();
        wgmma_pin(o);
      }
      wgmma_wait<0>();
      wgmma_pin(o);
      wgmma_pin(w);
      if (raised) rescale(o, factor);
      release(Shape::VEmpty, use_);
      if constexpr (Shape::TakeTurns) {
        softmax.weigh<T>(s, scale, w, softmax.sum);
      } else {
#pragma unroll
        for (int i = 0; i < kScores; i += 2) w[i / 2] = pack<T>(s[i], s[i + 1]);
      }
    }
    wait_full(Shape::VFull, use_, v_here);
    if (tail && end - 1 == low) zero_tail(length_ - low * Shape::N);
    issue_values(o, w, use_);
    wgmma_wait<0>();
    wgmma_pin(o);
    release(Shape::VEmpty, use_);
    ++use_;
  }

  // Scores, weights and values of a block one after the other: the other warpgroups fill the tensor cores meanwhile. With turns, the values
  // of a block and the scores of the next one are one turn, so that two warpgroups are in their softmax while the third has the products.
  __device__ __forceinline__ void blocks_in_order(const PrefillTile& tile, int slot, int low, int end, RowSoftmax& softmax,
                                                  float (&o)[kValues]) {
    static_assert(Shape::Plain);
    const float scale = p_.scale * kLog2E;
    const bool tail = end * Shape::N > length_;
    bool k_here = false;
    int block = end - 1;
    // A causal warpgroup may need only the first half of its last block of keys.
    constexpr int kHalf = Shape::N / 32 * 16;
    const int needed = (p_.causal ? min(length_, position_ + 64) : length_) - block * Shape::N;
    if (block >= low && needed <= kHalf) {
      first_block<kHalf>(tile, block, low, slot, scale, tail, k_here, softmax, o);
      --block;
    }
    // Until all rows have seen a key.
    for (; block >= low && (block == end - 1 || (p_.causal && (block + 1) * Shape::N > position_)); --block) {
      first_block<Shape::N>(tile, block, low, slot, scale, tail && block == end - 1, k_here, softmax, o);
    }
    for (; block >= low; --block) later_block(block, low, slot, scale, k_here, softmax, o);
  }

  // With masks, and with the maxima found before the exponentials.
  template <int Width>
  __device__ __forceinline__ void first_block(const PrefillTile& tile, int block, int low, int slot, float scale, bool tail, bool& k_here,
                                              RowSoftmax& softmax, float (&o)[kValues]) {
    float s[Width / 2], factor[2];
    uint32_t w[Width / 4];
    wait_full(Shape::KFull, use_, k_here);
    issue_scores(s, rows_of(slot), use_);
    end_turn();
    wgmma_wait<0>();
    wgmma_pin(s);
    release(Shape::KEmpty, use_);
    if (block == low) release_rows(slot);
    mask(tile, block, s);
    if (softmax.raise(s, scale, factor)) rescale(o, factor);
    const bool v_here = is_full(Shape::VFull, use_);
    k_here = is_full(Shape::KFull, use_ + 1);
    softmax.weigh<T>(s, scale, w, softmax.sum);
    add_values(w, v_here, tail ? length_ - block * Shape::N : Shape::N, o);
  }

  // Without a mask, for rows that have a reference. The sums of the weights tell whether they outgrew it; then, and only then, the block is
  // done again from its scores, which K, still there, gives once more.
  __device__ __forceinline__ void later_block(int block, int low, int slot, float scale, bool& k_here, RowSoftmax& softmax,
                                              float (&o)[kValues]) {
    float s[kScores], factor[2], part[2] = {0.f, 0.f};
    uint32_t w[kScores / 2];
    wait_full(Shape::KFull, use_, k_here);
    issue_scores(s, rows_of(slot), use_);
    end_turn();
    wgmma_wait<0>();
    wgmma_pin(s);
    const bool v_here = is_full(Shape::VFull, use_);
    k_here = is_full(Shape::KFull, use_ + 1);
    softmax.weigh<T>(s, scale, w, part);
    const bool over[2] = {!(part[0] <= kMostWeight<T>), !(part[1] <= kMostWeight<T>)};
    if (named_any(4 + group_, over[0] || over[1])) {
      issue_scores(s, rows_of(slot), use_);
      wgmma_wait<0>();
      wgmma_pin(s);
      softmax.raise_over(s, scale, over, factor);
      rescale(o, factor);
      part[0] = part[1] = 0.f;
      softmax.weigh<T>(s, scale, w, part);
    }
    softmax.sum[0] += part[0];
    softmax.sum[1] += part[1];
    release(Shape::KEmpty, use_);
    if (block == low) release_rows(slot);
    add_values(w, v_here, Shape::N, o);
  }

  // keys: of the block, behind which v's rows are to be zeroed.
  template <int Size>
  __device__ __forceinline__ void add_values(const uint32_t (&w)[Size], bool v_here, int keys, float (&o)[kValues]) {
    wait_full(Shape::VFull, use_, v_here);
    if (keys < Shape::N) zero_tail(keys);
    begin_turn();
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

  // Four lanes hold the pairs of a row's 8 columns; they exchange them, so that each writes 16 bytes of one of four blocks of columns: 64
  // bytes of a row at once, and rows that do not exist are not written.
  __device__ __forceinline__ void store(const PrefillTile& tile, RowSoftmax& softmax, float (&o)[kValues]) {
    const float* sink = p_.sinks != nullptr ? p_.sinks + tile.head : nullptr;
    const int rows = tile.rows - first_;
    const bool odd = lane_ & 1, high = lane_ & 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float lse;
      const float factor = softmax.finish(h, sink, lse);
      const int row = 16 * warp_ + lane_ / 4 + 8 * h;
      const int64_t at = (static_cast<int64_t>(tile.q_start) + first_ + row) * p_.heads + tile.head;
      if (p_.lse != nullptr && lane_ % 4 == 0 && row < rows) p_.lse[at] = lse;
      auto* out = static_cast<uint4*>(p_.out) + at * (Shape::Dv / 8) + lane_ % 4;
#pragma unroll
      for (int i = 0; i < kValues; i += 16) {
        uint32_t r[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) r[j] = pack<T>(o[i + 4 * j + 2 * h] * factor, o[i + 4 * j + 2 * h + 1] * factor);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? r[j] : r[j + 1], 1);
          (odd ? r[j] : r[j + 1]) = got;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? r[j] : r[j + 2], 2);
          (high ? r[j] : r[j + 2]) = got;
        }
        if (row < rows) out[i / 4] = uint4{r[0], r[1], r[2], r[3]};
      }
    }
  }

  __device__ __forceinline__ uint32_t full(int offset, int use) const { return smem_ + offset + 8 * slot_of<Shape::Stages>(use); }
  __device__ __forceinline__ void release(int offset, int use) {
    if (lane_ == 0) barrier_arrive(full(offset, use));
  }
  __device__ __forceinline__ void release_rows(int slot) {
    if (lane_ == 0) barrier_arrive(smem_ + Shape::QEmpty + 8 * slot);
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

// Rows of q that belong to no sequence, by the two idle warps of each CTA: nobody waits for q_starts[B] on their account.
template <class Shape>
__device__ __forceinline__ void clear_rows(const PrefillAttentionParams& p) {
  const int64_t from = p.q_starts[p.batch] * static_cast<int64_t>(p.heads), to = p.tokens * p.heads;
  constexpr int kPieces = Shape::Dv / 8;
  const int64_t step = static_cast<int64_t>(gridDim.x) * 64, mine = static_cast<int64_t>(blockIdx.x) * 64 + threadIdx.x - 64;
  for (int64_t i = from * kPieces + mine; i < to * kPieces; i += step) static_cast<uint4*>(p.out)[i] = uint4{0, 0, 0, 0};
  if (p.lse == nullptr) return;
  for (int64_t i = from + mine; i < to; i += step) p.lse[i] = -INFINITY;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::Threads, 1)
    prefill_kernel(const __grid_constant__ PrefillAttentionParams p, const __grid_constant__ CUtensorMap q,
                   const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v, const int box) {
  extern __shared__ uint8_t raw[];
  __shared__ PrefillTile tiles[Shape::Tiles];
  __shared__ PrefillWalkState state;  // static, so that their addresses take no register of the producer
  const uint32_t smem = (smem_address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    prefetch_map(&q);
    prefetch_map(&k);
    prefetch_map(&v);
    for (int i = 0; i < Shape::Stages; ++i) {
      barrier_init(smem + Shape::KFull + 8 * i, 1);
      barrier_init(smem + Shape::KEmpty + 8 * i, 4 * Shape::Groups);
      barrier_init(smem + Shape::VFull + 8 * i, 1);
      barrier_init(smem + Shape::VEmpty + 8 * i, 4 * Shape::Groups);
    }
    for (int i = 0; i < Shape::Tiles; ++i) {
      barrier_init(smem + Shape::TileFull + 8 * i, 1);
      barrier_init(smem + Shape::TileEmpty + 8 * i, 4 * Shape::Groups + 1);
    }
    for (int i = 0; i < Shape::Slots; ++i) {
      barrier_init(smem + Shape::QFull + 8 * i, 1);
      barrier_init(smem + Shape::QEmpty + 8 * i, 4 * Shape::Groups);
    }
    barrier_init_fence();
    fence_async_shared();
  }
  __syncthreads();
  if (!p.beside) pdl_wait();
  if (p.leads) pdl_trigger();  // once all CTAs are here, whatever was ahead of this launch has ended
  if (threadIdx.x < 128) {
    registers_down<Shape::ProducerRegisters>();
    if (threadIdx.x < 32) {
      PrefillLoader<Shape>(p, &q, &k, &v, box, smem, tiles).run();
      pdl_trigger();
    } else if (threadIdx.x < 64) {
      walk_tiles<Shape>(p, smem, tiles, &state);
    } else {
      if (!p.second) clear_rows<Shape>(p);
      if (p.beside && blockIdx.x == 0) pdl_wait();  // who waits for this kernel has waited for the one before it
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

inline int prefill_sms() {
  int device = 0, sms = 0;
  check_launch(cudaGetDevice(&device), "prefill_attention");
  check_launch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "prefill_attention");
  return sms;
}

// Rows of the longest sequence if all others are decodes, which is all that the host knows of them.
inline int64_t prompt_rows(const PrefillAttentionParams& p) { return p.tokens - p.batch + 1; }

// What the shapes without the code for other masks serve.
inline bool is_plain(const PrefillAttentionParams& p) { return p.window == 0 && p.softcap == 0.f && p.mask == nullptr; }

template <class Shape>
void launch_prefill(PrefillAttentionParams p, cudaStream_t stream) {
  if (p.launch == 0) p.launch = next_prefill_launch();
  const int box = box_rows(p, Shape::N);
  const CUtensorMap q = make_tensor_map<4>("q", p.q, p.dtype, {Shape::Chunk, p.tokens, p.heads, Shape::KChunks},
                                           {p.q_token_stride, p.q_head_stride, Shape::Chunk}, {Shape::Chunk, 64, 1, 1}, Shape::MapSwizzle);
  const CUtensorMap k = keys_map<Shape>(p, "k", p.k, Shape::D, p.k_token_stride, p.k_head_stride, p.k_page_stride, box);
  const CUtensorMap v = keys_map<Shape>(p, "v", p.v, Shape::Dv, p.v_token_stride, p.v_head_stride, p.v_page_stride, box);
  const int64_t sms = prefill_sms(), most = (p.tokens / Shape::M + std::min<int64_t>(p.batch, p.tokens)) * p.heads;
  if (most >= 1 << kCountBits) throw std::runtime_error("prefill_attention: q has more than 2^24 tiles, expected fewer tokens or heads");
  if (p.all_ctas == 0) p.first_ctas = p.all_ctas = static_cast<int>(std::max<int64_t>(1, std::min(sms, most)));
  const int ctas = p.second ? p.all_ctas - p.first_ctas : p.first_ctas;
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ctas)), .block = dim3(Shape::Threads), .smem = Shape::Bytes};
  launch("prefill_attention", shape, stream, prefill_kernel<Shape>, p, q, k, v, box);
}

}  // namespace pyllm::attention
