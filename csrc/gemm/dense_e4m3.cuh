// Dense GEMM whose epilogue rounds to e4m3 with a given scale: what the next product of a model with static scales multiplies.
#pragma once
#include "common/fp8.cuh"
#include "gemm/dense_launch.cuh"

namespace pyllm::dense {

// An activation that the launch names: one kernel for all, where the choice is made once for many values.
constexpr int kAnyActivation = -2;

// The values of a chunk in e4m3, to shared memory: rows of kChunkRow bytes, two neighbours of a thread at a time. (stmatrix would want four
// neighbours of each, which takes as many shuffles as this takes stores more.)
template <class C, int Act>
__device__ __forceinline__ void round_chunk(const typename C::Sum* d, const float (&row_scale)[2], float inverse, uint32_t columns,
                                            uint32_t to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int u = 0; u < C::kChunkOut / 8; ++u) {
    float v[2][2], up[2][2];
    scale_unit<C>(v, d, C::Finish::kGated ? 2 * u : u, row_scale, columns);
    if constexpr (C::Finish::kGated) scale_unit<C>(up, d, 2 * u + 1, row_scale, columns);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float y[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        y[c] = gemm::activate(Act, v[h][c]);
        if constexpr (C::Finish::kGated) y[c] *= up[h][c];
      }
      const uint16_t pair = to_e4m3x2(y[0] * inverse, y[1] * inverse);
      const int row = 16 * warp + 8 * h + lane / 4, unit = u / 2 ^ (C::kChunkRow == 64 ? row >> 1 & 3 : 0);
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + row * C::kChunkRow + 16 * unit + 8 * (u % 2) + 2 * (lane % 4)), "h"(pair)
                   : "memory");
    }
  }
}

// store_chunk of results in e4m3.
template <class C>
__device__ __forceinline__ void store_chunk_e4m3(const typename C::Sum* d, const float (&row_scale)[2], const Maps& maps,
                                                 const gemm::EpilogueParams& e, const Shared<C>& smem, int consumer, int turn, int& buffer,
                                                 const Place& at) {
  static_assert(C::kChunkRow == 64 || (C::kChunkRow % 16 == 0 && C::kChunkRow / 16 % 2 == 1), "rows that do not meet in a bank");
  const bool leader = threadIdx.x % 128 == 0;
  const float inverse = 1.f / __ldcg(e.out_scale);
  if (leader) store_wait_read<C::kChunkBuffers - 1>();
  named_sync(1 + consumer, 128);
  const uint32_t to = smem.c(consumer) + buffer * C::kChunkBytes, columns = smem.columns(turn) + 8 * at.column;
  const auto round = [&](auto act) { round_chunk<C, decltype(act)::value>(d, row_scale, inverse, columns, to); };
  switch (e.act) {
    case fused::kSilu:
      round(std::integral_constant<int, fused::kSilu>{});
      break;
    case fused::kGelu:
      round(std::integral_constant<int, fused::kGelu>{});
      break;
    case fused::kGeluTanh:
      round(std::integral_constant<int, fused::kGeluTanh>{});
      break;
    case fused::kRelu2:
      round(std::integral_constant<int, fused::kRelu2>{});
      break;
    default:
      round(std::integral_constant<int, gemm::kNoActivation>{});
  }
  fence_async_shared();
  named_sync(1 + consumer, 128);
  if (leader) {
    tma_store(&maps.y, to, at.n, at.m);
    store_commit();
  }
  buffer = (buffer + 1) % C::kChunkBuffers;
}

template <class T, bool Gated, int BN>
using NarrowTile = Tile<T, __nv_bfloat16, Way::kTurns, 128, BN, 1, Full<kAnyActivation, Gated>, Sums::kPlain, __nv_fp8_e4m3>;

}  // namespace pyllm::dense
