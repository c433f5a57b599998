// Dense GEMM for many rows (sm_90a): y[m, n] = epilogue(sum_k x[m, k] w[n, k]), both operands K-major.
//
// Roles: one warpgroup feeds (warp 0: TMA of x and w; warp 1: column scales and bias), two warpgroups multiply (wgmma out of
// shared memory, fp32 or int32 sums in registers) and store (registers -> stmatrix -> swizzled shared memory -> TMA store).
// A ring of stages of 128 bytes along K connects them: full[s] counts the bytes of TMA, empty[s] the warps that have read the stage.
// Persistent: CTAs walk over tiles, groups of `raster` tiles along M first, so that the tiles in flight share rows of x and w in L2.
// Split: the CTAs of a cluster share one tile, each sums its part of K, and the parts are joined through distributed shared memory in a
// fixed order. (Multicast of x or w within clusters was measured too and gained nothing: the L2 keeps up with 128 x 128 tiles.)
// Tails: TMA fills reads outside with zeros and drops writes outside.
// Measured: see docs/gemm.md.
#pragma once
#include "gemm/dense_fp8.cuh"
#include "gemm/epilogue.cuh"

namespace pyllm::dense {

// Two neighbouring values of the residual, past the L1: a kernel that ran beside this one may have written them.
__device__ __forceinline__ uint32_t load_pair(const void* from) {
  uint32_t bits;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return bits;
}

// Where a chunk goes: of the output, and its first column inside the tile's sums.
struct Place {
  int m, n, column;
};

// The values of 8 columns of sums (unit u of the chunk) that this thread holds, scaled and with the bias: v[row half][column].
template <class C>
__device__ __forceinline__ void scale_unit(float (&v)[2][2], const typename C::Sum* d, int u, const float (&row_scale)[2],
                                           uint32_t columns) {
  float s0, b0, s1, b1;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(s0), "=f"(b0), "=f"(s1), "=f"(b1)
               : "r"(columns + 8 * (8 * u + 2 * static_cast<int>(threadIdx.x % 4))));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    v[h][0] = fmaf(static_cast<float>(d[4 * u + 2 * h]) * row_scale[h], s0, b0);
    v[h][1] = fmaf(static_cast<float>(d[4 * u + 2 * h + 1]) * row_scale[h], s1, b1);
  }
}

// Activation or gate, soft cap, residual (its bits in `add`) of 8 columns of the output.
template <class C>
__device__ __forceinline__ void finish_unit(float (&v)[2][2], const float (&up)[2][2], const gemm::EpilogueParams& e,
                                            const uint32_t (&add)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float y = v[h][c];
      if constexpr (C::Finish::kAct != gemm::kNoActivation) y = gemm::activate(C::Finish::kAct, y);
      if constexpr (C::Finish::kGated) y *= up[h][c];
      if (e.softcap != 0.f) y = e.softcap * tanhf(y * fused::fast_reciprocal(e.softcap));
      if (e.residual != nullptr) {
        const uint16_t bits = add[h] >> (16 * c);
        y += to_float(reinterpret_cast<const typename C::Out&>(bits));
      }
      v[h][c] = y;
    }
  }
}

// The epilogue may write the sums of its results' squares, for the norm of the next product.
template <class C>
constexpr bool kSumsSquares =
    C::Finish::kFull && !C::Finish::kGated && C::Finish::kAct == gemm::kNoActivation && C::BN == 128 && C::kSplit == 1 && !C::kNarrow;

// And the kernels with an activation, gate or residual may take a row's factor from such sums. (The others are as fast as they are
// without.)
template <class C>
constexpr bool kReadsSquares = C::Finish::kFull && sizeof(typename C::T) == 2 && !C::kNarrow;

template <class Out>
__device__ __forceinline__ float square_of_pair(uint32_t bits) {
  const uint16_t low = bits, high = bits >> 16;
  const float a = to_float(reinterpret_cast<const Out&>(low)), b = to_float(reinterpret_cast<const Out&>(high));
  return fmaf(a, a, b * b);
}

// The sum over a quad of lanes, which hold a row; the same bits in all four.
__device__ __forceinline__ float sum_of_quad(float v) {
  v += __shfl_xor_sync(0xffffffff, v, 1);
  return v + __shfl_xor_sync(0xffffffff, v, 2);
}

// What RMSNorm multiplies a row of x by: out of the sums of its squares, in an order of its own.
__device__ __forceinline__ float norm_factor(const gemm::EpilogueParams& e, int row, int k) {
  const float* from = e.x_squares + static_cast<int64_t>(row) * e.x_squares_count;
  float sum = 0.f;
  for (int i = threadIdx.x % 4; i < e.x_squares_count; i += 4) sum += __ldcg(from + i);
  return rsqrtf(sum_of_quad(sum) / static_cast<float>(k) + e.eps);
}

// One chunk of 64 rows x kChunk columns of sums: epilogue, rounding, and on to TMA. `buffer` goes round those of this warpgroup.
template <class C>
__device__ __forceinline__ void store_chunk(const typename C::Sum* d, const float (&row_scale)[2], const Maps& maps, const Shape& shape,
                                            const gemm::EpilogueParams& e, const Shared<C>& smem, int consumer, int turn, int& buffer,
                                            const Place& at, float* squares = nullptr) {
  constexpr int kUnits = C::kChunkOut / 8;  // of 8 columns of the output, 16 bytes
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t to = smem.c(consumer) + buffer * C::kChunkBytes;
  const bool leader = threadIdx.x % 128 == 0;
  [[maybe_unused]] uint32_t add[C::Finish::kFull ? kUnits : 1][2] = {};
  if constexpr (C::Finish::kFull) {
    if (e.residual != nullptr) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = at.m + 16 * warp + 8 * h + lane / 4, column = at.n + 8 * u + 2 * (lane % 4);
          if (row < shape.m && column < (C::Finish::kGated ? shape.n / 2 : shape.n)) {
            add[u][h] = load_pair(static_cast<const typename C::Out*>(e.residual) + row * e.residual_stride + column);
          }
        }
      }
    }
  }
  if (leader) store_wait_read<C::kChunkBuffers - 1>();
  named_sync(1 + consumer, 128);
  const int row = 16 * warp + lane % 16;
  const uint32_t columns = smem.columns(turn) + 8 * at.column;
#pragma unroll
  for (int u = 0; u < kUnits; u += 2) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float v[2][2], up[2][2] = {};
      if constexpr (C::Finish::kGated) {
        scale_unit<C>(v, d, 2 * (u + i), row_scale, columns);
        scale_unit<C>(up, d, 2 * (u + i) + 1, row_scale, columns);
      } else {
        scale_unit<C>(v, d, u + i, row_scale, columns);
      }
      if constexpr (C::Finish::kFull) finish_unit<C>(v, up, e, add[u + i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        packed[2 * i + h] = gemm::pack<typename C::Out>(v[h][0], v[h][1]);
        if constexpr (kSumsSquares<C>) squares[h] += square_of_pair<typename C::Out>(packed[2 * i + h]);
      }
    }
    const int unit = u + lane / 16;
    const int swizzled = unit ^ (C::kChunkOut == 64 ? row & 7 : C::kChunkOut == 32 ? row >> 1 & 3 : row >> 2 & 1);
    store_matrix(to + row * C::kChunkOut * 2 + swizzled * 16, packed);
  }
  fence_async_shared();
  named_sync(1 + consumer, 128);
  if (leader) {
    tma_store(&maps.y, to, at.n, at.m);
    store_commit();
  }
  buffer = (buffer + 1) % C::kChunkBuffers;
}

// store_chunk of results in e4m3: dense_e4m3.cuh.
template <class C>
__device__ __forceinline__ void store_chunk_e4m3(const typename C::Sum* d, const float (&row_scale)[2], const Maps& maps,
                                                 const gemm::EpilogueParams& e, const Shared<C>& smem, int consumer, int turn, int& buffer,
                                                 const Place& at);

// The sums of a tile: scales of rows, and chunk by chunk to memory.
template <class C>
__device__ __forceinline__ void store_tile(const typename C::Sum (&d)[C::kBlocksM][C::R], const Maps& maps, const Shape& shape,
                                           const gemm::EpilogueParams& e, const Shared<C>& smem, const Walk<C>& walk, int consumer,
                                           int turn, uint32_t columns_phase, int& buffer, int m, int n) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float row_scale[C::kBlocksM][2];
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m + 64 * i + 16 * warp + 8 * h + lane / 4;
      row_scale[i][h] = e.row_scale != nullptr && row < shape.m ? __ldcg(e.row_scale + static_cast<int64_t>(row) * e.row_scale_step) : 1.f;
      if constexpr (kReadsSquares<C>) {
        if (e.x_squares != nullptr) row_scale[i][h] = norm_factor(e, min(row, shape.m - 1), shape.k);
      }
    }
  }
  barrier_wait(smem.columns_full(turn), columns_phase);
  const int own = C::kSplit > 1 ? walk.split * (C::BN / C::kSplit) : 0;
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
    float squares[2] = {};
#pragma unroll
    for (int c = 0; c < C::BN / C::kChunk / C::kSplit; ++c) {
      const int column = own + c * C::kChunk;
      const Place at{m + 64 * i, C::Finish::kGated ? (n + column) / 2 : n + column, column};
      const auto* sums = &d[i][c * C::kChunk / 2];
      if constexpr (C::kNarrow) {
        store_chunk_e4m3<C>(sums, row_scale[i], maps, e, smem, consumer, turn, buffer, at);
      } else {
        store_chunk<C>(sums, row_scale[i], maps, shape, e, smem, consumer, turn, buffer, at, squares);
      }
    }
    if constexpr (kSumsSquares<C>) {
      if (e.squares != nullptr) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sum = sum_of_quad(squares[h]);
          const int row = m + 64 * i + 16 * warp + 8 * h + lane / 4;
          if (lane % 4 == 0 && row < shape.m) e.squares[static_cast<int64_t>(row) * ((shape.n + 127) / 128) + n / 128] = sum;
        }
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void consume(const Maps& maps, const Shape& shape, const gemm::EpilogueParams& e, const Shared<C>& smem,
                                        const Walk<C>& walk) {
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  const int share = consumer % C::kSharers, turn = C::kTiles > 1 ? consumer : 0;
  Ring<C> ring;
  if (turn > 0) {
    gemm::pass_turn();
    ring.skip(walk.k_end - walk.k_begin);
  }
  uint32_t columns_phase = 0;
  int buffer = 0;
  for (int tile = walk.first() + turn * walk.step; tile < walk.count(); tile += C::kTiles * walk.step, columns_phase ^= 1) {
    int m, n;
    walk.origin(tile, shape.raster, m, n);
    m += share * C::kBlocksM * 64;
    if constexpr (C::kWay == Way::kTurns) gemm::take_turn();
    typename C::Sum d[C::kBlocksM][C::R];
    sum_plain<C>(d, smem, walk, share, ring);
    if constexpr (C::kTiles > 1) ring.skip((C::kTiles - 1) * (walk.k_end - walk.k_begin));
    if constexpr (C::kSplit > 1) join_split<C>(d, smem, walk);
    store_tile<C>(d, maps, shape, e, smem, walk, consumer, turn, columns_phase, buffer, m, n);
    if constexpr (C::kSplit > 1) break;  // one tile each; in a loop the compiler would let each product wait for the last
    if (threadIdx.x % 32 == 0) barrier_arrive(smem.columns_empty(turn));
  }
  if (threadIdx.x % 128 == 0) store_wait<0>();
}

// Sums by blocks: the first products of a tile, and its scales, are on their way while the tile before is stored.
template <class C>
__device__ __forceinline__ void consume_blocks(const Maps& maps, const Shape& shape, const gemm::EpilogueParams& e, const Blocks& blocks,
                                               const Shared<C>& smem, const Walk<C>& walk) {
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  // Known to be the same for all lanes, addresses stay in uniform registers: 4 % less time.
  const int share = __shfl_sync(0xffffffff, consumer, 0);
  Ring<C> ring;
  uint32_t columns_phase = 0;
  int buffer = 0, m, n, tile = walk.first();
  walk.origin(tile, shape.raster, m, n);
  m += 64 * share;
  BlockSums<C> sums;
  BlockScales<C> scales(shape, blocks, m, n, walk);
  start_blocks<C>(sums, smem, share, ring);
  while (true) {
    float d[1][C::R];
    sum_blocks<C>(d, sums, scales, smem, walk, share, ring);
    if constexpr (C::kSplit > 1) {  // one tile each
      join_split<C>(d, smem, walk);
      store_tile<C>(d, maps, shape, e, smem, walk, consumer, 0, columns_phase, buffer, m, n);
      break;
    }
    tile += walk.step;
    const int m_done = m, n_done = n;
    const auto store = [&] { store_tile<C>(d, maps, shape, e, smem, walk, consumer, 0, columns_phase, buffer, m_done, n_done); };
    if (tile >= walk.count()) {
      store();
      break;
    }
    walk.origin(tile, shape.raster, m, n);
    m += 64 * share;
    scales = BlockScales<C>(shape, blocks, m, n, walk);
    start_blocks<C>(sums, smem, share, ring);
    store();
    if (threadIdx.x % 32 == 0) barrier_arrive(smem.columns_empty(0));
    columns_phase ^= 1;
  }
  if (threadIdx.x % 128 == 0) store_wait<0>();
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    gemm_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Shape shape,
                const __grid_constant__ gemm::EpilogueParams epilogue, const __grid_constant__ Blocks blocks) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> smem{smem_address(memory)};
  const Walk<C> walk(shape);
  const int warp = threadIdx.x / 32;
  if (warp == 0 && elect_one()) {
    prefetch_map(&maps.x);
    prefetch_map(&maps.w);
    prefetch_map(&maps.y);
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(smem.full(s), 1);
      barrier_init(smem.empty(s), C::kSharers * 4);
    }
#pragma unroll
    for (int t = 0; t < C::kTiles; ++t) {
      barrier_init(smem.columns_full(t), 32);
      barrier_init(smem.columns_empty(t), C::kSharers * 4);
    }
    if constexpr (C::kSplit > 1) {
      barrier_init(smem.landed(), 1);
      barrier_arrive_expect(smem.landed(), C::kBytesJoin);
    }
    barrier_init_fence();
  }
  if constexpr (C::kSplit > 1) {
    __syncwarp();
    cluster_arrive();  // join_split waits
  }
  __syncthreads();
  if (warp < 4) {
    if constexpr (C::kConsumers > 1) registers_down<C::kProducerRegisters>();  // 256 threads have what they need
    if (warp == 0) {
      if (elect_one()) produce<C>(maps, shape, smem, walk);
      __syncwarp();
    } else if (warp == 1) {
      pdl_wait();
      produce_columns<C>(shape, epilogue, smem, walk);
    }
    pdl_trigger();
    if constexpr (C::kSplit > 1) {
      __syncwarp();
      cluster_wait();
    }
  } else {
    if constexpr (C::kConsumers > 1) registers_up<C::kConsumerRegisters>();
    pdl_wait();
    if constexpr (C::kSums == Sums::kBlock) {
      consume_blocks<C>(maps, shape, epilogue, blocks, smem, walk);
    } else {
      consume<C>(maps, shape, epilogue, smem, walk);
    }
  }
}

}  // namespace pyllm::dense
