// y[m, n] = epilogue(sum_k x[m, k] w[n, k]) for M <= 8 of bf16 or fp16: CTAs that each stream some rows of w once.
//
// A CTA takes 8 R rows of w at a time; its eight warps take an eighth of K each, so no warp waits for another before the sums are added. A
// warp asks for its part of the rows in pieces of 256 or 512 bytes (bulk copies into a ring of its own) before it waits for the kernel
// ahead, which does not write weights. Shared memory holds the loads in flight: through registers the same stream took 1.2 to 1.6 times as
// long. Two CTAs of an SM have 128 KiB in flight; with 192 KiB (28672, 4096) took 75 to 88 us instead of 56.
//
// Products: mma m16n8k16, x the 16-row side. K is permuted within 32 elements, alike in x and w, so that the 16 bytes that a lane holds of
// a row are operands as they are.
//
// Order of a sum: within an eighth of K in order, then the eighths in order. It depends on K alone.
// Norm: y = rstd[m] sum_k round(x[m, k] norm_weight[k]) w[n, k]; each CTA sums the squares of its rows of x again.
// Limits: base and rows of x and w at multiples of 16 bytes.
#pragma once
#include <type_traits>

#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/vec.cuh"
#include "gemm/epilogue.cuh"

namespace pyllm::gemm {

constexpr int kStreamRows = 8;  // the largest M: x is the 16-row side of mma, half of it zeros
constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = kStreamWarps * 32;
constexpr int kStepBytes = 64;  // of a row of w: what the four lanes of a row hold in one access

struct StreamArgs {
  const uint8_t* w;
  const uint8_t* x;
  void* out;
  int64_t w_stride, x_stride;  // bytes
  int m, columns;              // of the output
  int rows;                    // of w: columns, gated twice that
  int row_bytes;               // of K elements
  const void* norm_weight;
  bool norm_fp32;
  float eps;
  EpilogueParams epilogue;
};

// Bytes of a row that one warp takes.
__host__ __device__ constexpr int stream_share(int row_bytes) {
  return (row_bytes + kStreamWarps * kStepBytes - 1) / (kStreamWarps * kStepBytes) * kStepBytes;
}

// R: groups of eight rows of w that a CTA takes at a time, gated half of them of the up projection.
// A warp's ring: stages of Chunk bytes of each row. The distance of two rows is an odd multiple of 64 bytes: they fill the banks.
template <int R, int Chunk, int Stages>
struct StreamShape {
  static constexpr int kPitch = Chunk % 128 == 64 ? Chunk : Chunk + 64;
  static constexpr int kStage = 8 * R * kPitch;
  static constexpr int kBarriers = kStreamWarps * Stages * kStage;  // of the stages and one of x for each warp
  static constexpr int kSums = kBarriers + kStreamWarps * (Stages + 1) * 8;
  // Rows of m in two areas of partial sums, the squares of each warp, and x; lanes of two rows of x fill the banks too.
  __host__ __device__ static constexpr int one_sum(int m) { return kStreamWarps * m * 8 * R * 4; }
  __host__ __device__ static constexpr int x_pitch(int share) { return (share + 127) / 128 * 128 + 64; }
  __host__ __device__ static constexpr int squares(int m) { return kSums + 2 * one_sum(m); }
  __host__ __device__ static constexpr int x_rows(int m) { return squares(m) + kStreamWarps * kStreamRows * 4; }
  __host__ __device__ static constexpr int shared_bytes(int m, int share) { return x_rows(m) + kStreamWarps * m * x_pitch(share); }
};

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_16(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_pair(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// c (+)= 8 rows of x times 8 rows of w over 16 of K.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(0), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(0), "r"(b0), "r"(b1));
  }
}
template <class T, int R, int Chunk, int Stages, bool Gated, bool Norm>
struct Stream {
  using Shape = StreamShape<R, Chunk, Stages>;
  static constexpr int kSteps = Chunk / kStepBytes, kRows = 8 * R, kColumns = Gated ? kRows / 2 : kRows;

  const StreamArgs& a;
  int lane, warp, group, quad;  // a lane holds row `group` of eight, the `quad`-th 16 bytes of each step
  int begin, bytes, share;      // of a row, in w
  int chunks, first, last;      // of a unit; units of this CTA
  int m_pitch;
  uint32_t ring, barriers, x_barrier, sums, squares, x;

  __device__ __forceinline__ Stream(const StreamArgs& args, uint32_t base, int units) : a(args) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    share = stream_share(a.row_bytes), begin = warp * share, bytes = max(0, min(share, a.row_bytes - begin));
    chunks = (share + Chunk - 1) / Chunk;
    first = static_cast<int>(static_cast<int64_t>(units) * blockIdx.x / gridDim.x);
    last = static_cast<int>(static_cast<int64_t>(units) * (blockIdx.x + 1) / gridDim.x);
    m_pitch = Shape::x_pitch(share);
    ring = base + warp * Stages * Shape::kStage, barriers = base + Shape::kBarriers + warp * (Stages + 1) * 8;
    x_barrier = barriers + Stages * 8;
    sums = base + Shape::kSums, squares = base + Shape::squares(a.m), x = base + Shape::x_rows(a.m) + warp * a.m * m_pitch;
  }

  // Row of w behind row `local` of a unit.
  __device__ __forceinline__ int row_of(int unit, int local) const {
    if constexpr (!Gated) return min(unit * kRows + local, a.rows - 1);
    const int column = unit * kColumns + local % kColumns;
    return min(column, a.columns - 1) + local / kColumns * a.columns;
  }

  // One warp asks for its q-th piece.
  __device__ __forceinline__ void load(int q) const {
    const int unit = first + q / chunks, offset = q % chunks * Chunk, size = max(0, min(Chunk, bytes - offset));
    const uint32_t to = ring + q % Stages * Shape::kStage, barrier = barriers + q % Stages * 8;
    if (lane == 0) barrier_arrive_expect(barrier, size * kRows);
    __syncwarp();
    if (lane < kRows && size > 0) {
      bulk_load(to + lane * Shape::kPitch, a.w + row_of(unit, lane) * a.w_stride + begin + offset, size, barrier);
    }
  }

  // This warp's part of x on its way to shared memory.
  __device__ __forceinline__ void load_x() const {
    if (lane == 0) barrier_arrive_expect(x_barrier, bytes * a.m);
    __syncwarp();
    if (lane < a.m && bytes > 0) {
      bulk_load(x + lane * m_pitch, a.x + lane * a.x_stride + begin, bytes, x_barrier);
    }
  }

  // Once it is there: zeros past the end of K; with a norm x is scaled by its weight, and its squares are summed.
  __device__ __forceinline__ void prepare_x() const {
    barrier_wait(x_barrier, 0);
    if (!Norm && bytes == share) return;
    for (int m = 0; m < a.m; ++m) {
      const uint32_t row = x + m * m_pitch;
      float sum = 0.f;
      for (int at = lane * 16; at < share; at += 32 * 16) {
        uint4 raw{};
        if (at < bytes) raw = load_shared_16(row + at);
        if constexpr (Norm) {
          float g[8];
          norm_weights(g, (begin + at) / 2, at < bytes);
          scale(raw, g, sum);
        }
        store_shared_16(row + at, raw);
      }
      if constexpr (Norm) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (lane == 0) asm volatile("st.shared.f32 [%0], %1;" ::"r"(squares + (warp * kStreamRows + m) * 4), "f"(sum) : "memory");
      }
    }
    __syncwarp();
  }

  template <int Items>
  __device__ __forceinline__ void norm_weights(float (&g)[Items], int k, bool inside) const {
#pragma unroll
    for (int i = 0; i < Items; i += 4) {
      if (!inside) {
        g[i] = g[i + 1] = g[i + 2] = g[i + 3] = 0.f;
      } else if (a.norm_fp32) {
        const float4 w = __ldg(static_cast<const float4*>(a.norm_weight) + (k + i) / 4);
        g[i] = w.x, g[i + 1] = w.y, g[i + 2] = w.z, g[i + 3] = w.w;
      } else {
        const Vec<T, 4> w = load_vec<T, 4>(static_cast<const T*>(a.norm_weight) + k + i);
#pragma unroll
        for (int e = 0; e < 4; ++e) g[i + e] = to_float(w[e]);
      }
    }
  }

  template <int Items>
  static __device__ __forceinline__ void scale(uint4& raw, const float (&g)[Items], float& sum) {
    Vec<T, Items> v = reinterpret_cast<Vec<T, Items>&>(raw);
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      const float value = to_float(v[i]);
      sum = fmaf(value, value, sum);
      v[i] = from_float<T>(value * g[i]);
    }
    raw = reinterpret_cast<uint4&>(v);
  }

  // Brings the norm's weights to the L1 while the kernel ahead still runs: no kernel writes them.
  __device__ __forceinline__ void touch_norm_weight() const {
    const int item = a.norm_fp32 ? 4 : 2;
    const char* base = static_cast<const char*>(a.norm_weight) + static_cast<int64_t>(begin) / 2 * item;
    for (int at = lane * 32; at < bytes / 2 * item; at += 32 * 32) {
      uint32_t word;
      asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(base + at));
    }
  }

  // One step of x and w: sums of 8 R rows.
  __device__ __forceinline__ void step(float (&acc)[R][4], uint32_t w, int at) const {
    const bool inside = at + quad * 16 < bytes;
    const uint4 u = group < a.m ? load_shared_16(x + group * m_pitch + at + quad * 16) : uint4{};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const uint4 v = inside ? load_shared_16(w + (8 * r + group) * Shape::kPitch + quad * 16) : uint4{};
      multiply<T>(acc[r], u.x, u.y, v.x, v.y);
      multiply<T>(acc[r], u.z, u.w, v.z, v.w);
    }
  }

  __device__ __forceinline__ void run() const {
    const int total = (last - first) * chunks;
    if (lane <= Stages) barrier_init(barriers + lane * 8, 1);
    barrier_init_fence();
    __syncwarp();
#pragma unroll
    for (int q = 0; q < Stages; ++q) {
      if (q < total) load(q);
    }
    if (total <= Stages) pdl_trigger();
    if constexpr (Norm) touch_norm_weight();
    pdl_wait();
    load_x();
    prepare_x();
    for (int unit = first, q = 0; unit < last; ++unit) {
      float acc[R][4] = {};
      for (int c = 0; c < chunks; ++c, ++q) {
        barrier_wait(barriers + q % Stages * 8, q / Stages & 1);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          if (c * Chunk + s * kStepBytes < bytes) {
            step(acc, ring + q % Stages * Shape::kStage + s * kStepBytes, c * Chunk + s * kStepBytes);
          }
        }
        __syncwarp();
        if (q + Stages >= total) continue;
        if (q + Stages == total - 1) pdl_trigger();  // with the last load: the next kernel's loads come behind it
        load(q + Stages);
      }
      // Two areas: a warp may be a unit ahead of one that still adds.
      const uint32_t area = sums + (unit - first) % 2 * Shape::one_sum(a.m);
      share_sums(acc, area);
      __syncthreads();
      finish(unit, area);
    }
  }

  __device__ __forceinline__ void share_sums(const float (&acc)[R][4], uint32_t area) const {
    if (group >= a.m) return;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      store_shared_pair(area + ((warp * a.m + group) * kRows + 8 * r + 2 * quad) * 4, acc[r][0], acc[r][1]);
    }
  }

  __device__ __forceinline__ float2 total_of(uint32_t area, int m, int local) const {
    float2 sum{};
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) {
      const float2 part = load_shared_pair(area + ((w * a.m + m) * kRows + local) * 4);
      sum.x += part.x, sum.y += part.y;
    }
    return sum;
  }

  __device__ __forceinline__ float row_factor(int m) const {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) {
      float part;
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part) : "r"(squares + (w * kStreamRows + m) * 4) : "memory");
      sum += part;
    }
    return rsqrtf(sum / static_cast<float>(a.row_bytes / static_cast<int>(sizeof(T))) + a.eps);
  }

  __device__ __forceinline__ void finish(int unit, uint32_t area) const {
    static_assert(kStreamRows * kColumns / 2 <= kStreamThreads, "a pair of columns for each thread");
    const int m = threadIdx.x / (kColumns / 2), local = threadIdx.x % (kColumns / 2) * 2, n = unit * kColumns + local;
    const int count = min(2, a.columns - n);
    if (m >= a.m || count <= 0) return;
    const Epilogue<T, 2> epilogue{a.epilogue};
    float factor = 1.f;
    if constexpr (Norm) factor = row_factor(m);
    const float2 sum = total_of(area, m, local);
    float v[2] = {sum.x * factor, sum.y * factor};
    epilogue.scale(v, m, n, count);
    if constexpr (Gated) {
      const float2 other = total_of(area, m, local + kColumns);
      float up[2] = {other.x * factor, other.y * factor};
      epilogue.scale(up, m, a.columns + n, count);
      epilogue.gate(v, up);
    } else {
      epilogue.activate(v);
    }
    epilogue.finish(v, m, n, count);
    store_columns(static_cast<T*>(a.out) + static_cast<int64_t>(m) * a.columns + n, v, count, a.columns % 2 == 0);
  }
};

template <class T, int R, int Chunk, int Stages, bool Gated, bool Norm>
__global__ void __launch_bounds__(kStreamThreads, 2) skinny_stream_kernel(const __grid_constant__ StreamArgs args, const int units) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Stream<T, R, Chunk, Stages, Gated, Norm> stream(args, smem_address(shared), units);
  stream.run();
}

}  // namespace pyllm::gemm
