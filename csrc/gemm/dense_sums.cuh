// Dense GEMM: sums over K in the tensor cores' accumulators, and joining the parts of a split.
#pragma once
#include "gemm/dense_tile.cuh"

namespace pyllm::dense {

template <class C>
__device__ __forceinline__ void multiply(typename C::Sum (&d)[C::kBlocksM][C::R], const Shared<C>& smem, int share, int stage,
                                         bool accumulate) {
  const uint64_t a = smem_descriptor<SmemLayout::kSwizzle128>(smem.a(stage) + share * C::kBlocksM * 64 * kStageBytes, 8 * kStageBytes);
  const uint64_t b = smem_descriptor<SmemLayout::kSwizzle128>(smem.b(stage), 8 * kStageBytes);
#pragma unroll
  for (int k = 0; k < kStageBytes / 32; ++k) {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
      Wgmma<C::BN>::template ss<typename C::T>(d[i], descriptor_step(a, i * 64 * kStageBytes + 32 * k), descriptor_step(b, 32 * k),
                                               accumulate || k > 0);
    }
  }
}

template <class C>
__device__ __forceinline__ void sum_plain(typename C::Sum (&d)[C::kBlocksM][C::R], const Shared<C>& smem, const Walk<C>& walk, int share,
                                          Ring<C>& ring) {
  uint32_t previous = 0;
  for (int k = walk.k_begin; k < walk.k_end; ++k, ring.next()) {
    barrier_wait(smem.full(ring.stage), ring.phase);
    wgmma_fence();
    multiply<C>(d, smem, share, ring.stage, k > walk.k_begin);
    wgmma_commit();
    wgmma_wait<1>();
    if (k > walk.k_begin) gemm::release(previous);
    previous = smem.empty(ring.stage);
  }
  if constexpr (C::kWay == Way::kTurns) gemm::pass_turn();
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) wgmma_pin(d[i]);
  gemm::release(previous);
}

// The address of this CTA's shared memory in another CTA of the cluster.
__device__ __forceinline__ uint32_t shared_of(uint32_t address, int rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// To another CTA of the cluster; its barrier counts the bytes.
template <class Sum>
__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, const Sum* v) {
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) bits[i] = reinterpret_cast<const uint32_t&>(v[i]);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(bits[0]),
               "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void load_shared(float (&v)[4], uint32_t from) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from));
}
__device__ __forceinline__ void load_shared(int (&v)[4], uint32_t from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(from));
}

// The parts of a split. Parts of d trade places so that part p holds the columns of CTA (split ^ p): part 0 stays here, the others are
// sent to their owners, who wait for all of theirs and add them in the order of p. Returns the sums of columns [split BN / kSplit, ...) in
// part 0. Its place in shared memory serves nothing else, so nobody asks whether it is free: with barriers of the cluster before and behind
// the stores 64 x 4096 x 4096 took 0.6 us longer.
// (Swaps by select, not branches on the split: the compiler joins those into one with a run-time register index, out of local memory.)
template <class C>
__device__ __forceinline__ void join_split(typename C::Sum (&d)[C::kBlocksM][C::R], const Shared<C>& smem, const Walk<C>& walk) {
  using Sum = typename C::Sum;
  constexpr int kLine = 128 * C::kConsumers * 16;  // 16 bytes of each thread
  constexpr int kOwn = C::R / C::kSplit, kPart = kLine / 4 * C::kBlocksM * kOwn;
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int bit = 1; bit < C::kSplit; bit *= 2) {
      const bool swap = walk.split & bit;
#pragma unroll
      for (int j = 0; j < C::R; ++j) {
        const int other = j + bit * kOwn;
        if (j / kOwn & bit) continue;
        const Sum low = d[i][j], high = d[i][other];
        d[i][j] = swap ? high : low;
        d[i][other] = swap ? low : high;
      }
    }
  }
  const uint32_t mine = smem.join() + (threadIdx.x - 128) * 16;
  cluster_wait();  // the others run, their barriers are there
#pragma unroll
  for (int p = 1; p < C::kSplit; ++p) {
    const uint32_t to = shared_of(mine + (p - 1) * kPart, walk.split ^ p), barrier = shared_of(smem.landed(), walk.split ^ p);
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; j += 4) send(to + (i * kOwn + j) / 4 * kLine, barrier, &d[i][p * kOwn + j]);
    }
  }
  barrier_wait(smem.landed(), 0);
#pragma unroll
  for (int p = 1; p < C::kSplit; ++p) {
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; j += 4) {
        Sum part[4];
        load_shared(part, mine + (p - 1) * kPart + (i * kOwn + j) / 4 * kLine);
#pragma unroll
        for (int c = 0; c < 4; ++c) d[i][j + c] += part[c];
      }
    }
  }
}

}  // namespace pyllm::dense
