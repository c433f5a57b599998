// Prefill attention of e4m3 queries, keys and values on sm_90a. docs/attention.md explains the data flow.
//
// A CTA owns 128 query rows of one head at a time: two consumer warpgroups of 64 rows and one producer warpgroup. Producer warp 0 walks
// the work list and starts the TMA copies; warps 1..3 turn each tile of V around in shared memory, since an 8-bit wgmma reads its B
// operand along k only. S = Q K^T comes from shared memory, P V takes P from registers.
//
// Keys are stored in V^T in the order in which a thread holds them in S: position 16 a + 4 c + 2 b + e of a row of V^T is key
// 16 a + 8 b + 2 c + e, which is both what ldmatrix.trans + PRMT yields and what makes a thread's four packed P values the A operand.
// Row 16 a + 8 e + g of V^T is column 16 a + 2 g + e of V: eight consecutive rows per stmatrix (no bank conflict), and a thread of O
// holds four neighbouring columns.
//
// Sums of a wgmma over e4m3 keep about 14 bits, so the product of one tile of keys goes to `part` and is added to O in fp32.
//
// Measured on an H200, 16k tokens in one sequence, H=32 K=8 D=128: 890 TFLOP/s full, 903 causal (FlashAttention-3: 669, 694 in the same
// run).
#pragma once
#include <cuda_bf16.h>

#include "attention/prefill_attention.h"
#include "attention/prefill_fp8_load.cuh"
#include "attention/prefill_fp8_softmax.cuh"
#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/wgmma.cuh"

namespace pyllm::fp8 {

template <class Tile>
struct Consumer {
  static constexpr int kS = Tile::kKeys / 2, kO = Tile::kDim / 2, kPart = Tile::kChunk / 2;
  using QK = Wgmma<Tile::kKeys>;
  using PV = Wgmma<Tile::kChunk>;

  static __device__ __forceinline__ void scores(float (&s)[kS], uint64_t q, uint64_t k) {
#pragma unroll
    for (int i = 0; i < Tile::kDim / 32; ++i) {
      const int at = i / (Tile::kBox / 32), in = i % (Tile::kBox / 32) * 32;
      QK::template ss<__nv_fp8_e4m3>(s, descriptor_step(q, at * Tile::kRows * Tile::kBox + in),
                                     descriptor_step(k, at * Tile::kKeys * Tile::kBox + in), i > 0);
    }
  }

  static __device__ __forceinline__ void values(float (&part)[kPart], uint32_t (&p)[Tile::kKeys / 32][4], uint64_t v) {
#pragma unroll
    for (int i = 0; i < Tile::kKeys / 32; ++i) {
      PV::template rs<__nv_fp8_e4m3>(part, p[i], descriptor_step(v, i / 4 * Tile::kDim * 128 + i % 4 * 32), i > 0);
    }
  }
};

// Columns of O from register `at` on.
template <int All, int Some>
__device__ __forceinline__ void promote(float (&o)[All], const float (&part)[Some], const float (&alpha)[2], int at = 0) {
#pragma unroll
  for (int i = 0; i < Some; ++i) o[at + i] = fmaf(o[at + i], alpha[i / 2 % 2], part[i]);
}

// One work item of a warpgroup: its 64 rows against all of their keys.
template <class Tile, class Softmax>
__device__ __forceinline__ void attend(const PrefillAttentionParams& p, const Item& item, const Smem<Tile>& smem, Ring<Tile::kStagesK>& ks,
                                       Ring<Tile::kStagesT>& ts, int group, int row, float (&o)[Tile::kDim / 2], Softmax& softmax) {
  using C = Consumer<Tile>;
  constexpr uint32_t kGroup = 8 * Tile::kBox;
  float s[C::kS], part[C::kO], alpha[2];
  uint32_t packed[Tile::kKeys / 32][4];
  const uint64_t q = smem_descriptor<Tile::kLayout>(smem.q() + group * 64 * Tile::kBox, kGroup);
  const auto k_at = [&](int stage) { return smem_descriptor<Tile::kLayout>(smem.k(stage), kGroup); };
  const auto v_at = [&](int stage) { return smem_descriptor<SmemLayout::kSwizzle128>(smem.t(stage), 1024); };
  const bool leader = threadIdx.x % 32 == 0;

  int tile = item.last_tile;
  barrier_wait(smem.full_k(ks.stage), ks.phase);
  wgmma_fence();
  C::scores(s, q, k_at(ks.stage));
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(s);
  if (leader) barrier_arrive(smem.empty_k(ks.stage));
  ks.next();
  softmax.step(p, item, row, s, tile, alpha);
  softmax.add(s, alpha);
  softmax.pack(packed, s);
  for (--tile; tile >= item.first_tile; --tile) {
    barrier_wait(smem.full_k(ks.stage), ks.phase);
    wgmma_fence();
    C::scores(s, q, k_at(ks.stage));
    wgmma_commit();
    barrier_wait(smem.full_t(ts.stage), ts.phase);
    C::values(part, packed, v_at(ts.stage));
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_pin(s);
    if (leader) barrier_arrive(smem.empty_k(ks.stage));
    ks.next();
    float next[2];
    softmax.step(p, item, row, s, tile, next);
    wgmma_pin(s);
    wgmma_wait<0>();  // the assembler moves it up, ahead of the exponentials: additions to O and packing then fill their gaps (4 %)
    wgmma_pin(part);
    wgmma_pin(s);
#pragma unroll
    for (auto& block : packed) wgmma_pin(block);
    softmax.add(s, next);
    if (leader) barrier_arrive(smem.empty_t(ts.stage));
    ts.next();
    promote(o, part, alpha);
    softmax.pack(packed, s);
    alpha[0] = next[0], alpha[1] = next[1];
  }

  barrier_wait(smem.full_t(ts.stage), ts.phase);
  wgmma_fence();
  C::values(part, packed, v_at(ts.stage));
  wgmma_commit();
  if (leader) barrier_arrive(smem.empty_q());
  wgmma_wait<0>();
  wgmma_pin(part);
  if (leader) barrier_arrive(smem.empty_t(ts.stage));
  ts.next();
  promote(o, part, alpha);
}

// The same where two tiles of S fit into registers: P V of the tile before and Q K^T of the next one run beside the whole of a softmax
// (D = 64, 8k keys: 593 against 508 TFLOP/s full, 558 against 487 causal). Tiles go in pairs, so that no product is in flight where the
// loop turns: ptxas would wait for it. Tiles that a mask touches, but for the first of a run, go one by one.
template <class Tile, class Softmax>
struct AheadConsumer {
  using C = Consumer<Tile>;
  const PrefillAttentionParams& p;
  const Item& item;
  const Smem<Tile>& smem;
  Ring<Tile::kStagesK>& ks;
  Ring<Tile::kStagesT>& ts;
  const int row;
  float (&o)[C::kO];
  Softmax& softmax;
  const uint64_t q;
  const bool leader;
  using Packed = uint32_t[Tile::kKeys / 32][4];

  __device__ __forceinline__ void issue_scores(float (&s)[C::kS], int stage) {
    C::scores(s, q, smem_descriptor<Tile::kLayout>(smem.k(stage), 8 * Tile::kBox));
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_values(float (&part)[C::kPart], Packed& packed) {
    C::values(part, packed, smem_descriptor<SmemLayout::kSwizzle128>(smem.t(ts.stage), 1024));
    wgmma_commit();
  }
  __device__ __forceinline__ void release_k() {
    if (leader) barrier_arrive(smem.empty_k(ks.stage));
    ks.next();
  }
  __device__ __forceinline__ void release_t() {
    if (leader) barrier_arrive(smem.empty_t(ts.stage));
    ts.next();
  }
  // S of the first of a run of tiles.
  __device__ __forceinline__ void first(float (&s)[C::kS]) {
    barrier_wait(smem.full_k(ks.stage), ks.phase);
    wgmma_fence();
    issue_scores(s, ks.stage);
    wgmma_wait<0>();
    wgmma_pin(s);
    release_k();
  }
  // P V of the last tile.
  __device__ __forceinline__ void last(Packed& packed, const float (&alpha)[2]) {
    float part[C::kPart];
    barrier_wait(smem.full_t(ts.stage), ts.phase);
    wgmma_fence();
    issue_values(part, packed);
    wgmma_wait<0>();
    wgmma_pin(part);
    release_t();
    promote(o, part, alpha);
  }
  __device__ __forceinline__ void release_q() {
    if (leader) barrier_arrive(smem.empty_q());
  }
  // ends: no other tile needs the rows of q.
  __device__ __forceinline__ void single(int tile, bool ends) {
    float s[C::kS], alpha[2];
    Packed packed;
    first(s);
    if (ends) release_q();
    softmax.step(p, item, row, s, tile, alpha);
    softmax.add(s, alpha);
    softmax.pack(packed, s);
    last(packed, alpha);
  }
  // The softmax of s. Values: P V of the tile before, whose alpha comes in, runs beside it and is added to O. Scores: so do the scores of
  // the tile behind, to `next`. `tile` is asked for masks without Values, in the first of a run.
  template <bool Values, bool Scores>
  __device__ __forceinline__ void half(float (&s)[C::kS], float (&next)[C::kS], Packed& packed, float (&alpha)[2], int tile = 0) {
    float part[C::kPart], alpha_before[2] = {alpha[0], alpha[1]}, bias[2];
    if constexpr (Scores) barrier_wait(smem.full_k(ks.stage), ks.phase);
    if constexpr (Values) barrier_wait(smem.full_t(ts.stage), ts.phase);
    wgmma_fence();
    if constexpr (Values) issue_values(part, packed);
    if constexpr (Scores) issue_scores(next, ks.stage);
    if constexpr (!Values) softmax.mask(p, item, row, s, tile);
    softmax.look(s, alpha, bias);
    if constexpr (Values) {
      wgmma_wait<Scores ? 1 : 0>();
      wgmma_pin(part);
#pragma unroll
      for (auto& block : packed) wgmma_pin(block);
      release_t();
      promote(o, part, alpha_before);
    }
    softmax.weigh(s, bias);
    softmax.add(s, alpha);
    softmax.pack(packed, s);
    // Never: a branch that needs the sums, or ptxas moves the wait ahead of the exponentials.
    if (Scores && softmax.sum[0] + softmax.sum[1] < 0.f) asm volatile("nanosleep.u32 0;" ::: "memory");
    if constexpr (Scores) {
      barrier_wait(smem.full_t(ts.stage), ts.phase);  // what the next product needs
      wgmma_wait<0>();
      wgmma_pin(next);
      release_k();
    }
  }
  // count >= 2 tiles, of which a mask touches the first at most.
  __device__ __forceinline__ void run(int tile, int count, bool ends) {
    float s0[C::kS], s1[C::kS], alpha[2] = {1.f, 1.f};
    Packed packed;
    first(s0);
    half<false, true>(s0, s1, packed, alpha, tile);
    for (count -= 2; count >= 2; count -= 2) {
      half<true, true>(s1, s0, packed, alpha);
      half<true, true>(s0, s1, packed, alpha);
    }
    if (count > 0) {
      half<true, true>(s1, s0, packed, alpha);
      if (ends) release_q();
      half<true, false>(s0, s1, packed, alpha);
    } else {
      if (ends) release_q();
      half<true, false>(s1, s0, packed, alpha);
    }
    last(packed, alpha);
  }
};

template <class Tile, class Softmax>
__device__ __forceinline__ void attend_ahead(const PrefillAttentionParams& p, const Item& item, const Smem<Tile>& smem,
                                             Ring<Tile::kStagesK>& ks, Ring<Tile::kStagesT>& ts, int group, int row,
                                             float (&o)[Tile::kDim / 2], Softmax& softmax) {
  AheadConsumer<Tile, Softmax> ahead{p,
                                     item,
                                     smem,
                                     ks,
                                     ts,
                                     row,
                                     o,
                                     softmax,
                                     smem_descriptor<Tile::kLayout>(smem.q() + group * 64 * Tile::kBox, 8 * Tile::kBox),
                                     threadIdx.x % 32 == 0};
  const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };  // products must not stand on paths that ptxas thinks divergent
  const int first_tile = uniform(item.first_tile), plain_upto = uniform(item.plain_upto);
  const int plain_from = max(uniform(item.plain_from), first_tile);
  for (int tile = uniform(item.last_tile); tile >= first_tile;) {
    const int count = tile <= plain_upto ? tile - plain_from + 1 : 0;
    if (count >= 2) {
      ahead.run(tile, count, tile - count < first_tile);
      tile -= count;
    } else {
      ahead.single(tile, tile == first_tile);
      --tile;
    }
  }
}

// The same where S and two sets of O do not fit into registers: a warpgroup's products and its softmax take turns, and only the other
// warpgroup's softmax hides behind the products.
template <class Tile, class Softmax>
__device__ __forceinline__ void attend_wide(const PrefillAttentionParams& p, const Item& item, const Smem<Tile>& smem,
                                            Ring<Tile::kStagesK>& ks, Ring<Tile::kStagesT>& ts, int group, int row,
                                            float (&o)[Tile::kDim / 2], Softmax& softmax) {
  using C = Consumer<Tile>;
  constexpr uint32_t kGroup = 8 * Tile::kBox;
  const uint64_t q = smem_descriptor<Tile::kLayout>(smem.q() + group * 64 * Tile::kBox, kGroup);
  const bool leader = threadIdx.x % 32 == 0;
  for (int tile = item.last_tile; tile >= item.first_tile; --tile) {
    float alpha[2];
    uint32_t packed[Tile::kKeys / 32][4];
    {
      float s[C::kS];
      barrier_wait(smem.full_k(ks.stage), ks.phase);
      named_sync(kTurn + group, 256);
      wgmma_fence();
      C::scores(s, q, smem_descriptor<Tile::kLayout>(smem.k(ks.stage), kGroup));
      wgmma_commit();
      named_arrive(kTurn + 1 - group, 256);
      wgmma_wait<0>();
      wgmma_pin(s);
      if (leader) barrier_arrive(smem.empty_k(ks.stage));
      ks.next();
      if (leader && tile == item.first_tile) barrier_arrive(smem.empty_q());
      softmax.step(p, item, row, s, tile, alpha);
      softmax.add(s, alpha);
      softmax.pack(packed, s);
    }
    barrier_wait(smem.full_t(ts.stage), ts.phase);
#pragma unroll
    for (int i = 0; i < Tile::kDim / Tile::kChunk; ++i) {
      float part[C::kPart];
      wgmma_fence();
      C::values(part, packed, smem_descriptor<SmemLayout::kSwizzle128>(smem.t(ts.stage) + i * Tile::kChunk * 128, 1024));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(part);
      promote(o, part, alpha, i * C::kPart);
    }
    if (leader) barrier_arrive(smem.empty_t(ts.stage));
    ts.next();
  }
}

template <class Tile, bool Capped>
__device__ __forceinline__ void consume(const PrefillAttentionParams& p, const Smem<Tile>& smem, int group) {
  Ring<Tile::kStagesK> ks;
  Ring<Tile::kStagesT> ts;
  Ring<Tile::kItems> items;
  uint32_t q_phase = 0;
  if (Tile::kWide && group == 1) named_arrive(kTurn, 256);  // the first turn is warpgroup 0's
  const int lane = threadIdx.x % 32;
  for (;; items.next()) {
    barrier_wait(smem.full_item(items.stage), items.phase);
    const Item& item = *smem.item(items.stage);
    if (item.rows <= 0) break;
    float o[Tile::kDim / 2];
#pragma unroll
    for (float& x : o) x = 0.f;
    const int row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    Softmax<Tile::kKeys, Capped> softmax(p, item, row);
    if (item.last_tile >= item.first_tile) {
      barrier_wait(smem.full_q(), q_phase);
      q_phase ^= 1;
      if constexpr (Tile::kWide) {
        attend_wide<Tile>(p, item, smem, ks, ts, group, row, o, softmax);
      } else if constexpr (Tile::kAhead && !Capped) {  // a softcap's constants find no registers there
        attend_ahead<Tile>(p, item, smem, ks, ts, group, row, o, softmax);
      } else {
        attend<Tile>(p, item, smem, ks, ts, group, row, o, softmax);
      }
    }
    float factor[2], lse[2];
    softmax.finish(p, item, factor, lse);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= item.rows) continue;
      const int64_t token = item.token + row + 8 * h;
      auto* out = static_cast<__nv_bfloat16*>(p.out) + (token * p.heads + item.head) * Tile::kDim + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < Tile::kDim / 16; ++i) {  // columns 4 c .. 4 c + 3 of 16: n8 block 2 i holds 0 and 2, block 2 i + 1 holds 1 and 3
        const float* even = o + 8 * i + 2 * h;
        const float f = factor[h];
        __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(even[0] * f, even[4] * f), __floats2bfloat162_rn(even[1] * f, even[5] * f)};
        *reinterpret_cast<uint2*>(out + 16 * i) = *reinterpret_cast<const uint2*>(pair);
      }
      if (p.lse != nullptr && lane % 4 == 0) p.lse[token * p.heads + item.head] = lse[h];
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(smem.empty_item(items.stage));
  }
}

template <class Tile, bool Paged, bool Capped>
__global__ void __launch_bounds__(384, 1)
    prefill_fp8_kernel(const __grid_constant__ PrefillAttentionParams p, const __grid_constant__ CUtensorMap q_map,
                       const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Smem<Tile> smem{smem_address(shared), shared};
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) smem.init();
  __syncthreads();
  if (!p.beside) pdl_wait();
  if (warp < 4) {
    registers_down<Tile::kProducerRegisters>();
    if (warp == 0) {
      load<Tile, Paged>(p, smem, q_map, k_map, v_map);
      if (p.beside) pdl_wait();  // who waits for this kernel has waited for the one before it
    } else {
      turn_values<Tile>(smem, warp - 1);
    }
  } else {
    registers_up<Tile::kConsumerRegisters>();
    consume<Tile, Capped>(p, smem, warp / 4 - 1);
  }
}

}  // namespace pyllm::fp8
