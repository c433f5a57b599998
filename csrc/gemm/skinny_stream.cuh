// y[m, n] = epilogue(sum_k x[m, k] w[n, k]) for M <= 16 of bf16, fp16 or e4m3: CTAs that each stream some rows of w once.
//
// A CTA takes 16 or 32 rows of w at a time; its eight warps take an eighth of K each, and no warp waits for another until all sums are
// added, once or a few times for a CTA. A warp asks for its part of the rows in boxes of 128 bytes of each (TMA, into a ring of its own)
// before it waits for the kernel ahead, which does not write weights. Shared memory holds the loads in flight: through registers the same
// stream took 1.2 to 1.6 times as long, and a bulk copy for each row instead of a box for all of them up to 1.9 times.
//
// Products: mma m16n8k16, w the 16-row side. K is permuted within a step of 64 bytes, alike in x and w, so that the 16 bytes that a lane
// holds of a row are operands as they are; e4m3 is widened to fp16 first, exactly.
//
// Order of a sum: within an eighth of K in order, even and odd products of 16 apart, then the eighths in order. It depends on K alone.
// Norm: y = rstd[m] sum_k round(x[m, k] norm_weight[k]) w[n, k]; each CTA sums the squares of its rows of x again.
// Limits: base and rows of x and w at multiples of 16 bytes.
#pragma once
#include <type_traits>

#include "common/launch.h"
#include "common/ptx_sm90.cuh"
#include "common/shared_access.cuh"
#include "common/vec.cuh"
#include "gemm/epilogue.cuh"

namespace pyllm::gemm {

constexpr int kStreamRows = 16;  // the largest M: x is the 8-column side of mma, once or twice
constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = kStreamWarps * 32;
constexpr int kStepBytes = 64;    // of a row of w: what the four lanes of a row hold in one access
constexpr int kSliceBytes = 128;  // of a row of w in a box: the span of the 128-byte swizzle

// Offsets in shared memory, behind the rings.
struct StreamLayout {
  int barriers, sums, squares, scales, x, bytes;
};

struct StreamArgs {
  const uint8_t* x;
  void* out;
  int64_t x_stride;  // bytes
  int m, columns;    // of the output
  int m_inverse;     // 2^16 / m rounded up: turns are few
  int row_bytes;     // of K elements
  int units;         // of the whole weight: what a CTA takes at a time
  int share;         // of row_bytes: what a warp takes
  int stages;        // of a warp's ring
  int batch;         // units whose sums are added at once
  StreamLayout at;
  const void* norm_weight;
  bool norm_fp32;
  float eps;
  EpilogueParams epilogue;
};

// Bytes of a row that one warp takes.
constexpr int stream_share(int row_bytes) {
  return (row_bytes + kStreamWarps * kSliceBytes - 1) / (kStreamWarps * kSliceBytes) * kSliceBytes;
}

// Rows of w that a CTA takes at a time: a unit, gated half of them of the up projection, by eight in turn. A stage of a warp's ring: Slices
// boxes.
template <int Rows, int Slices>
struct StreamShape {
  static_assert(Rows % 16 == 0, "the 16-row side of mma");
  static constexpr int kSlice = Rows * kSliceBytes, kStage = Slices * kSlice;
  __host__ __device__ static constexpr int unit_sums(int m) { return kStreamWarps * m * Rows * 4; }

  // `units` of a CTA at most.
  static constexpr StreamLayout layout(int m, int share, int stages, int batch, int units, bool scaled) {
    StreamLayout l{};
    const int batches = (units + batch - 1) / batch;
    l.barriers = kStreamWarps * stages * kStage;                        // of the stages and one of x for each warp
    l.sums = l.barriers + kStreamWarps * (stages + 1) * 8;              // two areas, where there is more than one batch
    l.squares = l.sums + (batches > 1 ? 2 : 1) * batch * unit_sums(m);  // of each warp and row of x
    l.scales = l.squares + kStreamWarps * kStreamRows * 4;              // of rows, of columns
    l.x = l.scales + (scaled ? (kStreamRows + units * Rows) * 4 : 0);
    // Rows of x of even and of odd number lie 64 bytes more than a multiple of 128 apart: two neighbours fill the banks.
    l.x = (l.x + 127) / 128 * 128;
    l.bytes = l.x + kStreamWarps * x_warp(m, share);
    return l;
  }
  __host__ __device__ static constexpr int x_warp(int m, int share) { return m * share + (m > 1 ? 128 : 0); }
};

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// c (+)= 16 rows of w times 8 rows of x over 16 of K.
template <class T>
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Four e4m3 as fp16, exact: the two pairs of one operand of mma.
struct Widened {
  uint32_t lo, hi;
  __device__ __forceinline__ explicit Widened(uint32_t four) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(lo), "=r"(hi)
        : "r"(four));
  }
};

// Tiles: of eight rows of x.
template <class T, class Out, int Tiles, int Rows, int Slices, bool Gated, bool Norm>
struct Stream {
  using Shape = StreamShape<Rows, Slices>;
  static constexpr int kItems = kSliceBytes / sizeof(T), kColumns = Gated ? Rows / 2 : Rows;
  static constexpr int kGroups = Rows / 16;        // of rows of w
  static constexpr bool kScaled = sizeof(T) == 1;  // by row and by column of the output
  static_assert(!Norm || sizeof(T) == 2, "the norm's result is rounded to x's type");

  const StreamArgs& a;
  const CUtensorMap* w_map;
  const uint8_t* shared;
  uint32_t base;                // of shared memory
  int lane, warp, group, quad;  // a lane holds row `group` of each eight of x, row `own` of w, the `quad`-th 16 bytes of each step
  int own;                      // those of lanes 0 to 3 and 4 to 7 are four apart: the swizzle puts them in different banks
  int begin, bytes;             // of a row, in w
  int first, last;              // units of this CTA
  uint32_t ring, barriers, x;

  __device__ __forceinline__ Stream(const StreamArgs& args, const CUtensorMap* map, const uint8_t* memory)
      : a(args), w_map(map), shared(memory), base(smem_address(memory)) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
    own = group % 2 * 4 + group / 2;
    begin = warp * a.share, bytes = max(0, min(a.share, a.row_bytes - begin));
    first = static_cast<int>(static_cast<int64_t>(a.units) * blockIdx.x / gridDim.x);
    last = static_cast<int>(static_cast<int64_t>(a.units) * (blockIdx.x + 1) / gridDim.x);
    ring = base + warp * a.stages * Shape::kStage, barriers = base + a.at.barriers + warp * (a.stages + 1) * 8;
    x = base + a.at.x + warp * Shape::x_warp(a.m, a.share);
  }

  __device__ __forceinline__ uint32_t x_barrier() const { return barriers + a.stages * 8; }
  __device__ __forceinline__ uint32_t x_row(int row) const { return x + row % 2 * ((a.m + 1) / 2 * a.share + 64) + row / 2 * a.share; }

  struct Piece {
    int unit, offset, stage;
  };
  // One warp asks for its next piece.
  __device__ __forceinline__ void load(Piece& p) const {
    const int slices = min(Slices, (bytes - p.offset + kSliceBytes - 1) / kSliceBytes);
    if (elect_one()) {
      const uint32_t to = ring + p.stage * Shape::kStage, barrier = barriers + p.stage * 8;
      barrier_arrive_expect(barrier, slices * Shape::kSlice);
#pragma unroll
      for (int s = 0; s < Slices; ++s) {
        if (s >= slices) break;
        const int k = (begin + p.offset) / static_cast<int>(sizeof(T)) + s * kItems;
        if constexpr (Gated) {
          tma_load(to + s * Shape::kSlice, w_map, barrier, k, 0, 0, p.unit * (Rows / 16));
        } else {
          tma_load(to + s * Shape::kSlice, w_map, barrier, k, p.unit * Rows);
        }
      }
    }
    __syncwarp();
    p.stage = p.stage + 1 == a.stages ? 0 : p.stage + 1;
    p.offset += Slices * kSliceBytes;
    if (p.offset >= bytes) p.offset = 0, ++p.unit;
  }

  // This warp's part of x on its way to shared memory.
  __device__ __forceinline__ void load_x() const {
    if (lane == 0) barrier_arrive_expect(x_barrier(), bytes * a.m);
    __syncwarp();
    if (lane < a.m && bytes > 0) {
      bulk_load(x_row(lane), a.x + lane * a.x_stride + begin, bytes, x_barrier());
    }
  }

  // Once it is there: zeros past the end of K; with a norm x is scaled by its weight, and its squares are summed.
  __device__ __forceinline__ void prepare_x() const {
    barrier_wait(x_barrier(), 0);
    if (!Norm && a.row_bytes == kStreamWarps * a.share) return;
    for (int i = 0; i < a.m; ++i) {
      const uint32_t row = x_row(i);
      float sum = 0.f;
      for (int at = lane * 16; at < a.share; at += 32 * 16) {
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
        if (lane == 0) store_shared_float(base + a.at.squares + (warp * kStreamRows + i) * 4, sum);
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

  static __device__ __forceinline__ uint4 read(const uint8_t* from) { return *reinterpret_cast<const uint4*>(from); }

  // One slice of x and w. Products alternate between two sums, so that one need not wait for the last.
  __device__ __forceinline__ void multiply_slice(float (&acc)[kGroups][Tiles][2][4], const uint8_t* w, const uint8_t* const (&x_own)[Tiles],
                                                 int at) const {
#pragma unroll
    for (int s = 0; s < kSliceBytes / kStepBytes; ++s) {
      uint4 u[Tiles];
#pragma unroll
      for (int i = 0; i < Tiles; ++i) u[i] = read(x_own[i] + at + s * kStepBytes);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const uint8_t* row = w + g * 16 * kSliceBytes + (((4 * s + quad) ^ own) * 16);
        multiply_step(acc[g], read(row), read(row + 8 * kSliceBytes), u);
      }
    }
  }

  static __device__ __forceinline__ void multiply_step(float (&acc)[Tiles][2][4], const uint4& v, const uint4& t, const uint4 (&u)[Tiles]) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < Tiles; ++i) {
        multiply<T>(acc[i][0], v.x, t.x, v.y, t.y, u[i].x, u[i].y);
        multiply<T>(acc[i][1], v.z, t.z, v.w, t.w, u[i].z, u[i].w);
      }
    } else {
      const uint32_t low[4] = {v.x, v.y, v.z, v.w}, high[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Widened p(low[j]), q(high[j]);
#pragma unroll
        for (int i = 0; i < Tiles; ++i) {
          const Widened x(j == 0 ? u[i].x : j == 1 ? u[i].y : j == 2 ? u[i].z : u[i].w);
          multiply<__half>(acc[i][j % 2], p.lo, q.lo, p.hi, q.hi, x.lo, x.hi);
        }
      }
    }
  }

  // The scales of this CTA's columns on their way to shared memory, and that of row threadIdx.x: behind the weights in flight a load takes
  // microseconds.
  __device__ __forceinline__ float load_scales() const {
    const EpilogueParams& e = a.epilogue;
    for (int i = threadIdx.x; i < (last - first) * Rows; i += kStreamThreads) {
      const int unit = first + i / Rows, local = i % Rows, n = Gated ? unit * kColumns + local / 16 * 8 + local % 8 : unit * Rows + local;
      const int64_t from = n + (Gated && local % 16 >= 8 ? a.columns : 0);
      const uint32_t to = base + a.at.scales + (kStreamRows + i) * 4;
      if (e.column_scale != nullptr && n < a.columns) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(e.column_scale + from * e.column_scale_step) : "memory");
      } else {
        store_shared_float(to, 1.f);
      }
    }
    const int m = threadIdx.x;
    return m < a.m && e.row_scale != nullptr ? load_l2(e.row_scale + m * e.row_scale_step) : 1.f;
  }
  // Once they are needed.
  __device__ __forceinline__ void keep_scales(float row) const {
    if (threadIdx.x < kStreamRows) store_shared_float(base + a.at.scales + threadIdx.x * 4, row);
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
  // What a kernel wrote that may have run beside this one is read past the L1.
  static __device__ __forceinline__ float load_l2(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
  }

  __device__ __forceinline__ void run() const {
    if (lane <= a.stages) barrier_init(barriers + lane * 8, 1);
    barrier_init_fence();
    __syncwarp();
    Piece next{bytes > 0 ? first : last, 0, 0};
    for (int q = 0; q < a.stages && next.unit < last; ++q) load(next);
    if (next.unit == last) pdl_trigger();
    if constexpr (Norm) touch_norm_weight();
    pdl_wait();
    load_x();
    float row_scale = 1.f;
    if constexpr (kScaled) row_scale = load_scales();
    prepare_x();
    Place place{};
    for (int from = first, batch = 0; from < last; from += a.batch, ++batch) {
      // Two areas: a warp may be a batch ahead of one that still adds.
      const uint32_t area = base + a.at.sums + batch % 2 * a.batch * Shape::unit_sums(a.m);
      for (int unit = from; unit < min(from + a.batch, last); ++unit)
        multiply_unit(next, place, area + (unit - from) * Shape::unit_sums(a.m));
      if (kScaled && batch == 0) keep_scales(row_scale);
      __syncthreads();
      finish(from, area);
    }
  }

  struct Place {
    int stage;
    uint32_t parity;
  };

  __device__ __forceinline__ void multiply_unit(Piece& next, Place& place, uint32_t area) const {
    const uint8_t* w = shared + warp * a.stages * Shape::kStage + own * kSliceBytes;
    // Rows of x past the last one are the last one again: no row of a product depends on another.
    const uint8_t* x_own[Tiles];
#pragma unroll
    for (int i = 0; i < Tiles; ++i) x_own[i] = shared + (x_row(min(8 * i + group, a.m - 1)) - base) + quad * 16;
    float acc[kGroups][Tiles][2][4] = {};
    for (int from = 0; from < bytes; from += Slices * kSliceBytes) {
      barrier_wait(barriers + place.stage * 8, place.parity);
      const uint8_t* const at = w + place.stage * Shape::kStage;
      if (from + (Slices - 1) * kSliceBytes < bytes) {
#pragma unroll
        for (int s = 0; s < Slices; ++s) multiply_slice(acc, at + s * Shape::kSlice, x_own, from + s * kSliceBytes);
      } else {
        for (int s = 0; from + s * kSliceBytes < bytes; ++s) multiply_slice(acc, at + s * Shape::kSlice, x_own, from + s * kSliceBytes);
      }
      __syncwarp();
      if (++place.stage == a.stages) place.stage = 0, place.parity ^= 1;
      if (next.unit == last) continue;
      load(next);
      if (next.unit == last) pdl_trigger();  // with the last load: the next kernel's loads come behind it
    }
    share_sums(acc, area);
  }

  __device__ __forceinline__ void share_sums(const float (&acc)[kGroups][Tiles][2][4], uint32_t area) const {
#pragma unroll
    for (int i = 0; i < 2 * Tiles; ++i) {
      const int m = 8 * (i / 2) + 2 * quad + i % 2;
      if (m >= a.m) continue;
      const uint32_t to = area + ((warp * a.m + m) * Rows + own) * 4;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float (&sum)[2][4] = acc[g][i / 2];
        store_shared_float(to + g * 64, sum[0][i % 2] + sum[1][i % 2]);
        store_shared_float(to + g * 64 + 32, sum[0][i % 2 + 2] + sum[1][i % 2 + 2]);
      }
    }
  }

  // Of a batch's rows, that of a column; gated: of the gate, the up projection's is eight rows further.
  static __device__ __forceinline__ int row_of(int column) { return Gated ? column / 8 * 16 + column % 8 : column; }

  // Sums of row m of x and two columns of a batch, from its row `row` of w on.
  __device__ __forceinline__ float2 total_of(uint32_t area, int m, int row) const {
    const uint32_t from = area + row / Rows * Shape::unit_sums(a.m) + (m * Rows + row % Rows) * 4;
    float2 sum{};
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) {
      const float2 part = load_shared_pair(from + w * a.m * Rows * 4);
      sum.x += part.x, sum.y += part.y;
    }
    return sum;
  }

  // What scales row m and the two columns whose rows of w begin at `row`, counted from the CTA's first.
  __device__ __forceinline__ float2 factors(int m, int row) const {
    float factor = 1.f;
    if constexpr (Norm) factor = row_factor(m);
    if constexpr (!kScaled) return {factor, factor};
    const float2 columns = load_shared_pair(base + a.at.scales + (kStreamRows + row) * 4);
    factor = load_shared_float(base + a.at.scales + m * 4);
    return {factor * columns.x, factor * columns.y};
  }

  __device__ __forceinline__ float row_factor(int m) const {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) sum += load_shared_float(base + a.at.squares + (w * kStreamRows + m) * 4);
    return rsqrtf(sum / static_cast<float>(a.row_bytes / static_cast<int>(sizeof(T))) + a.eps);
  }

  __device__ __forceinline__ void finish(int from, uint32_t area) const {
    EpilogueParams params = a.epilogue;
    params.row_scale = params.column_scale = nullptr;  // they are in shared memory
    const Epilogue<Out, 2> epilogue{params};
    constexpr int kPairs = kColumns / 2;
    const int items = min(a.batch, last - from) * a.m * kPairs;
    for (int item = threadIdx.x; item < items; item += kStreamThreads) {
      const int pair = item % kPairs, turn = item / kPairs, unit = turn * a.m_inverse >> 16, m = turn - unit * a.m;
      const int column = unit * kColumns + 2 * pair, n = from * kColumns + column, row = row_of(column);
      const int count = min(2, a.columns - n), scales = (from - first) * Rows + row;
      if (count <= 0) continue;
      const float2 factor = factors(m, scales), sum = total_of(area, m, row);
      float v[2] = {sum.x * factor.x, sum.y * factor.y};
      epilogue.scale(v, m, n, count);
      if constexpr (Gated) {
        const float2 up_factor = factors(m, scales + 8), other = total_of(area, m, row + 8);
        float up[2] = {other.x * up_factor.x, other.y * up_factor.y};
        epilogue.scale(up, m, a.columns + n, count);
        epilogue.gate(v, up);
      } else {
        epilogue.activate(v);
      }
      epilogue.finish(v, m, n, count);
      store_columns(static_cast<Out*>(a.out) + static_cast<int64_t>(m) * a.columns + n, v, count, a.columns % 2 == 0);
    }
  }
};

template <class T, class Out, int Tiles, int Rows, int Slices, bool Gated, bool Norm>
__global__ void __launch_bounds__(kStreamThreads, 1)
    skinny_stream_kernel(const __grid_constant__ CUtensorMap w_map, const __grid_constant__ StreamArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Stream<T, Out, Tiles, Rows, Slices, Gated, Norm> stream(args, &w_map, shared);
  stream.run();
}

}  // namespace pyllm::gemm
