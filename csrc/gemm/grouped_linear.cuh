// Grouped GEMM (sm_90a): out[m, n] = f(sum_k x[rows[m], k] w[expert of m, n, k]), rows m sorted by expert.
//
// The weight is the 64-row side of wgmma, rows of x its N side: an expert with one row costs an N of 8, and one kernel serves decode (BX of
// 8 to 32, a stream of the weights) and prefill (BX of 128, tensor cores). The work is a list of tiles that the device made; the grid comes
// from shapes alone, and CTAs walk over the list.
//
// Roles: one warpgroup feeds, two multiply, each its own tile in turns: one stores while the other multiplies. Weights come by TMA, and
// so do rows of x that are in order; rows by index come by cp.async of all 128 feeding threads into the same swizzled layout.
// Rows past the expert's last: read as zeros (by index) or as what follows (in order; they touch no other row), never stored. The
// store's tensor map has kChunkRows rows that slide over the output, [chunk row, sliding row, column] at base + (c1 + c2) rows: a box
// that starts at c1 = kChunkRows - rows is cut by the map's bound to `rows`, so that TMA stores clipped tiles.
//
// Gated: groups of 8 rows of the gate and of the up projection alternate (a five-dimensional map of the weight), so that one thread
// holds both. Sums are transposed on the way to shared memory (stmatrix.trans).
// Before the previous kernel has ended only weights are read, and the list of tiles, which the one before that wrote.
#pragma once
#include "gemm/grouped_tile.cuh"

namespace pyllm::grouped {

template <class C>
__device__ __forceinline__ void load_w(const Maps& maps, const Shared<C>& smem, int stage, const Place& p, int step) {
  const uint32_t full = smem.full(stage);
  barrier_arrive_expect(full, C::kBytesW);
#pragma unroll
  for (int s = 0; s < C::kSlabs; ++s) {
    const uint32_t to = smem.w(stage) + s * C::kRowsW * kSlabBytes;
    const int k = step * C::BK + s * C::kItems;
    if constexpr (C::kFirst) {
      tma_load(to, &maps.w, full, k, 0, 0, p.w * (C::kRowsW / 16), p.expert);
    } else {
      tma_load(to, &maps.w, full, k, p.w * C::kRowsW, p.expert);
    }
  }
}

// Rows of x by index: all threads of the feeding warpgroup, the first one feeds the weights too.
template <class C>
__device__ __forceinline__ void produce_by_index(const Maps& maps, const Args& a, const Shared<C>& smem) {
  const int thread = threadIdx.x, unit = thread % 8;
  if (thread == 0) pdl_trigger();  // all CTAs of the grid run: the next kernel's, where they fit beside, may load their weights
  Walk<C> walk(a, 0, 1);
  Ring<C> ring;
  for (Place p; walk.take(p);) {
    const char* from[C::kOwnRows];
#pragma unroll
    for (int j = 0; j < C::kOwnRows; ++j) {
      const int row = p.row + (thread / 8 + 16 * j) % C::BX;
      from[j] = row < p.end ? static_cast<const char*>(a.x) + load_past_l1(a.rows + row) * a.x_stride : nullptr;
    }
    for (int step = 0; step < walk.steps; ++step, ring.next()) {
      const uint32_t full = smem.full(ring.stage);
      barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
      if (thread == 0) load_w<C>(maps, smem, ring.stage, p, step);
#pragma unroll
      for (int j = 0; j < C::kCopies; ++j) {
        const int line = thread / 8 + 16 * j, row = line % C::BX, slab = line / C::BX;
        const int column = (step * C::kSlabs + slab) * kSlabBytes + unit * 16;
        const char* source = from[j % C::kOwnRows];
        const bool inside = source != nullptr && column < a.k * static_cast<int>(sizeof(typename C::T));
        copy_async(smem.x(ring.stage) + line * kSlabBytes + ((unit ^ row % 8) * 16), inside ? source + column : a.x, inside);
      }
      copy_arrive(full);
    }
  }
  // Nobody leaves while copies of his are on their way.
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Rows of x in order: one thread. The ring is filled with weights before the wait for the previous kernel.
template <class C>
__device__ __forceinline__ void produce_in_order(const Maps& maps, const Args& a, const Shared<C>& smem) {
  Walk<C> walk(a, 0, 1);
  Ring<C> ring;
  bool waited = false;
  for (Place p; walk.take(p);) {
    int ahead = 0;
    if (!waited) {
      ahead = min(C::kStages, walk.steps);
      for (int step = 0; step < ahead; ++step) load_w<C>(maps, smem, step, p, step);
      pdl_wait();
      pdl_trigger();
      waited = true;
    }
    for (int step = 0; step < walk.steps; ++step, ring.next()) {
      if (step >= ahead) {
        barrier_wait(smem.empty(ring.stage), ring.phase ^ 1);
        load_w<C>(maps, smem, ring.stage, p, step);
      }
      const uint32_t full = smem.full(ring.stage);
      barrier_arrive_expect(full, C::kBytesX);
#pragma unroll
      for (int s = 0; s < C::kSlabs; ++s) {
        tma_load(smem.x(ring.stage) + s * C::BX * kSlabBytes, &maps.x, full, step * C::BK + s * C::kItems, p.row);
      }
    }
  }
  if (!waited) pdl_wait();
}

// The sums of one tile, for its first Width rows of x.
template <class C, int Width>
__device__ __forceinline__ void sum(float (&d)[C::kBlocks][C::R], const Shared<C>& smem, int steps, Ring<C>& ring) {
  uint32_t previous = 0;
  for (int step = 0; step < steps; ++step, ring.next()) {
    barrier_wait(smem.full(ring.stage), ring.phase);
    if constexpr (C::kFirst) fence_async_shared();  // rows of x came by cp.async, wgmma reads by the other proxy
    const uint64_t w = smem_descriptor<SmemLayout::kSwizzle128>(smem.w(ring.stage), 8 * kSlabBytes);
    const uint64_t x = smem_descriptor<SmemLayout::kSwizzle128>(smem.x(ring.stage), 8 * kSlabBytes);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < C::kSlabs; ++s) {
#pragma unroll
      for (int k = 0; k < kSlabBytes; k += 32) {
#pragma unroll
        for (int b = 0; b < C::kBlocks; ++b) {
          Wgmma<Width>::template ss<typename C::T>(reinterpret_cast<float (&)[Width / 2]>(d[b]),
                                                   descriptor_step(w, (s * C::kRowsW + 64 * b) * kSlabBytes + k),
                                                   descriptor_step(x, s * C::BX * kSlabBytes + k), step > 0 || s + k > 0);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0) gemm::release(previous);
    previous = smem.empty(ring.stage);
  }
  gemm::pass_turn();
  wgmma_wait<0>();
#pragma unroll
  for (int b = 0; b < C::kBlocks; ++b) wgmma_pin(reinterpret_cast<float (&)[Width / 2]>(d[b]));
  gemm::release(previous);
}

// g sigmoid(alpha g) (u + 1) of clamped g and u; comparisons that let a NaN through.
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float alpha, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return fused::times_sigmoid<false>(gate, alpha * gate) * (up + 1.f);
}

// The values of 8 rows of x (unit i) by two columns of the output for each row: v[q][c], q of the matrix and c of the row. Plain: columns
// of the halves of block b. Gated: of blocks 0 and 1.
template <class C>
__device__ __forceinline__ void finish_unit(uint32_t (&packed)[2], const float (&d)[C::kBlocks][C::R], int b, int i, const Args& a,
                                            const Columns<C>& w, [[maybe_unused]] uint32_t scales) {
  [[maybe_unused]] float s[2] = {1.f, 1.f};
  if constexpr (C::kScaled) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(s[0]), "=f"(s[1])
                 : "r"(scales + 4 * (8 * i + 2 * static_cast<int>(threadIdx.x % 4))));
  }
  const auto value = [&](int block, int half, int c) {
    float v = d[block][4 * i + 2 * half + c];
    if constexpr (C::kScaled) v *= s[c] * w.scale[block][half];
    return v + w.bias[block][half];
  };
#pragma unroll
  for (int q = 0; q < (C::kFirst ? C::kBlocks : 2); ++q) {
    float v[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (C::kFirst) {
        const float gate = value(q, 0, c), up = value(q, 1, c);
        v[c] = a.limit > 0.f ? clamped_swiglu(gate, up, a.alpha, a.limit) : gemm::activate(a.act, gate) * up;
      } else {
        v[c] = value(b, q, c);
      }
    }
    packed[q] = gemm::pack<typename C::Out>(v[0], v[1]);
  }
}

// Eight rows at most: each thread stores its two rows' values of each column.
template <class C>
__device__ __forceinline__ void store_direct(const float (&d)[C::kBlocks][C::R], const Columns<C>& w, const Args& a, const Shared<C>& smem,
                                             int consumer, const Place& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, columns = C::kFirst ? a.n / 2 : a.n, row = p.row + 2 * (lane % 4);
  if constexpr (C::kScaled) named_sync(1 + consumer, 128);  // the scales of x are there
  constexpr int kPairs = C::kFirst ? (C::kBlocks + 1) / 2 : C::kBlocks;
#pragma unroll
  for (int b = 0; b < kPairs; ++b) {
    uint32_t packed[2];
    finish_unit<C>(packed, d, b, 0, a, w, smem.scales(consumer));
#pragma unroll
    for (int q = 0; q < (C::kFirst ? C::kBlocks : 2); ++q) {
      const int column = p.w * C::kColumns + (C::kFirst ? 32 * q + 8 * warp : 64 * b + 16 * warp + 8 * q) + lane / 4;
      if (column >= columns) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint16_t bits = packed[q] >> (16 * c);
        if (row + c < p.end) static_cast<uint16_t*>(a.out)[static_cast<int64_t>(row + c) * columns + column] = bits;
      }
    }
  }
}

// Chunks of up to 64 rows x 64 columns: rounding, transposition, and on to TMA. `buffer` goes round those of this warpgroup.
template <class C>
__device__ __forceinline__ void store(const float (&d)[C::kBlocks][C::R], const Columns<C>& w, const Maps& maps, const Args& a,
                                      const Shared<C>& smem, int consumer, int& buffer, const Place& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool leader = threadIdx.x % 128 == 0;
  constexpr int kUnits = C::kChunkRows / 8;
#pragma unroll
  for (int part = 0; part < C::BX / C::kChunkRows; ++part) {
    const int row = p.row + part * C::kChunkRows, rows = min(C::kChunkRows, p.end - row);
    if (rows <= 0) break;
#pragma unroll
    for (int b = 0; b < (C::kFirst ? 1 : C::kBlocks); ++b) {
      const uint32_t to = smem.out(consumer) + buffer * C::kChunkBytes;
      if (leader) store_wait_read<C::kChunkBuffers - 1>();
      named_sync(1 + consumer, 128);
      // Lane i gives the row of matrix i / 8: matrices 0 and 1 are 8 rows of x, 2 and 3 the next 8.
      const int column = C::kFirst ? 4 * (lane / 8 % 2) + warp : 2 * warp + lane / 8 % 2;
      const uint32_t place = to + ((column ^ lane % 8) * 16) + (lane % 8 + lane / 16 * 8) * 128;
#pragma unroll
      for (int u = 0; u < kUnits; u += 2) {
        uint32_t low[2], high[2];
        finish_unit<C>(low, d, b, part * kUnits + u, a, w, smem.scales(consumer));
        finish_unit<C>(high, d, b, part * kUnits + u + 1, a, w, smem.scales(consumer));
        const uint32_t packed[4] = {low[0], low[1], high[0], high[1]};
        store_transposed(place + u * 8 * 128, packed);
      }
      fence_async_shared();
      named_sync(1 + consumer, 128);
      if (leader) {
        tma_store(&maps.y, to, p.w * C::kColumns + 64 * b, C::kChunkRows - rows, row + rows);
        store_commit();
      }
      buffer = (buffer + 1) % C::kChunkBuffers;
    }
  }
}

// Scales and biases of this thread's rows of the weight and, of e4m3, the tile's scales of x into shared memory.
template <class C>
__device__ __forceinline__ void load_columns(Columns<C>& w, const Args& a, const Shared<C>& smem, int consumer, const Place& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
#pragma unroll
  for (int b = 0; b < C::kBlocks; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int column = p.w * C::kColumns + (C::kFirst ? 32 * b + 8 * warp : 64 * b + 16 * warp + 8 * h) + lane / 4;
      const bool inside = column < (C::kFirst ? a.n / 2 : a.n);
      const int64_t n = static_cast<int64_t>(p.expert) * a.n + column + (C::kFirst ? h * (a.n / 2) : 0);
      if constexpr (C::kScaled) w.scale[b][h] = inside ? a.w_scale[n] : 0.f;
      w.bias[b][h] = a.bias != nullptr && inside ? to_float(static_cast<const typename C::Out*>(a.bias)[n]) : 0.f;
    }
  }
  if constexpr (C::kScaled) {
    named_sync(1 + consumer, 128);  // the last tile's scales have been read
    if (thread < C::BX) {
      const int row = p.row + thread;
      float s = 0.f;
      if (row < p.end) s = load_past_l1(a.x_scale + (C::kFirst ? load_past_l1(a.rows + row) : row));
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem.scales(consumer) + 4 * thread), "f"(s) : "memory");
    }
  }
}

template <class C>
__device__ __forceinline__ void consume(const Maps& maps, const Args& a, const Shared<C>& smem) {
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
  Walk<C> walk(a, consumer, 2);
  Ring<C> ring;
  if (consumer > 0) {
    gemm::pass_turn();
    ring.skip(walk.steps);
  }
  [[maybe_unused]] int buffer = 0;
  for (Place p; walk.take(p);) {
    Columns<C> w;
    load_columns<C>(w, a, smem, consumer, p);
    gemm::take_turn();
    float d[C::kBlocks][C::R];
    // An expert's last tile often has few rows: half the products then.
    if (C::BX == 128 && p.end - p.row <= 64) {
      sum<C, C::BX == 128 ? 64 : C::BX>(d, smem, walk.steps, ring);
    } else {
      sum<C, C::BX>(d, smem, walk.steps, ring);
    }
    ring.skip(walk.steps);
    if constexpr (C::kDirect) {
      store_direct<C>(d, w, a, smem, consumer, p);
    } else {
      store<C>(d, w, maps, a, smem, consumer, buffer, p);
    }
  }
  if (!C::kDirect && threadIdx.x % 128 == 0) store_wait<0>();
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtas)
    grouped_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const Shared<C> smem{smem_address(memory)};
  const int warp = threadIdx.x / 32;
  if (warp == 0 && elect_one()) {
    if constexpr (!C::kFirst) prefetch_map(&maps.x);
    prefetch_map(&maps.w);
    prefetch_map(&maps.y);
#pragma unroll
    for (int s = 0; s < C::kStages; ++s) {
      barrier_init(smem.full(s), C::kFirst ? 129 : 2);
      barrier_init(smem.empty(s), 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (C::kFirst) pdl_wait();
  if (warp < 4) {
    if constexpr (C::kCtas == 1) registers_down<C::kProducerRegisters>();
    if constexpr (C::kFirst) {
      produce_by_index<C>(maps, args, smem);
    } else if (warp == 0) {
      if (elect_one()) produce_in_order<C>(maps, args, smem);
      __syncwarp();
    }
  } else {
    if constexpr (C::kCtas == 1) registers_up<C::kConsumerRegisters>();
    if constexpr (!C::kFirst) pdl_wait();
    consume<C>(maps, args, smem);
  }
}

}  // namespace pyllm::grouped
