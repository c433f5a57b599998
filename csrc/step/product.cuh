// The products of a decode step: y[m, n] = epilogue(sum_k x[m, k] w[n, k]), and the stream of all weights of the step through the CTA.
//
// A CTA takes 8 rows of a weight at a time (of the gated one 4 gate rows and their 4 up rows). Units are dealt out to the CTAs in turn
// through all products of the step, so that after any number of them no CTA has had two more than another. Three roles:
// * One thread loads: it fills a ring of stages, 8 rows of up to 2 KiB each, with one TMA box a stage. What the CTA will read is known from
//   the start, so it runs ahead, into the next products of the step, while the CTA waits for values or attends.
// * Eight consumer warps multiply, each an eighth of every stage, and leave their sums. The weights are the 16-row side of the mma: their
//   eight rows twice, with one half of each 32 of k and with the other, so that 16 bytes of a lane are operands as they are.
// * Three finishing warps take the units in turn: one adds the eight sums of a row, applies scales, bias, activation and residual, and
// hands
//   the row to the other CTAs.
//
// e4m3 weights are widened to fp16, exactly; x is quantised per row to e4m3 and kept as fp16.
// Order of a sum: a warp's eighths of the stages, the halves of each 32 of k apart and alternate 32 apart, then the warps in order.
#pragma once
#include "common/fp8.cuh"
#include "gemm/epilogue.cuh"
#include "step/exchange.cuh"
#include "step/mma.cuh"
#include "step/plan.cuh"

namespace pyllm::step {

// A CTA's units of a product follow one another at the distance of the grid; `turn`: units of all products before, modulo the grid.
__device__ __forceinline__ int first_unit(int turn) {
  const int after = static_cast<int>(blockIdx.x) - turn;
  return after < 0 ? after + static_cast<int>(gridDim.x) : after;
}
__device__ __forceinline__ int next_turn(int turn, int units) { return (turn + units) % static_cast<int>(gridDim.x); }

// Barriers in shared memory: of the ring, and of the areas of partial sums.
struct Barriers {
  uint32_t base;
  int stages;
  __device__ __forceinline__ uint32_t full(int i) const { return base + i * 8; }
  __device__ __forceinline__ uint32_t empty(int i) const { return base + (stages + i) * 8; }
  __device__ __forceinline__ uint32_t summed(int i) const { return base + (2 * stages + i) * 8; }
  __device__ __forceinline__ uint32_t added(int i) const { return base + (2 * stages + kAreas + i) * 8; }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < stages; ++i) barrier_init(full(i), 1), barrier_init(empty(i), kWarps);
    for (int i = 0; i < kAreas; ++i) barrier_init(summed(i), kWarps), barrier_init(added(i), 1);
    barrier_init_fence();
  }
};

// A place in a ring, and the parity of its turn.
struct Place {
  int at = 0, parity = 0;
  __device__ __forceinline__ void next(int count) {
    if (++at == count) at = 0, parity ^= 1;
  }
};

// M rows of values, `stride` bytes apart; base null: the tokens' embeddings.
struct RowsAt {
  uint8_t* base;
  int64_t stride;
};

// What one product reads and writes.
struct Task {
  RowsAt x, residual, to;
  bool adds;          // the residual
  const float* norm;  // null: none
  const float* weight_scale;
  const __nv_bfloat16* bias;
  bool final;  // logits: plain stores
};

// What consumers and finishing warps share.
struct Product {
  const Args& a;
  Barriers barriers;
  uint32_t sums, squares, x, ring;
  int lane, warp;
  int turn = 0;   // units of all products before this one, modulo the grid
  int count = 0;  // products so far
  Place area;

  __device__ __forceinline__ Product(const Args& args, uint32_t base)
      : a(args),
        barriers{base + args.barriers, args.stages},
        sums(base + args.sums),
        squares(base + args.squares),
        x(base + args.x),
        ring(base) {
    lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  }

  __device__ __forceinline__ Source source(const RowsAt& rows, int m) const {
    if (rows.base != nullptr) return {rows.base + m * rows.stride, ~0u};
    const int id = __ldg(a.p.ids + m);
    const bool known = id >= 0 && id < a.p.vocab;
    return {known ? static_cast<const uint8_t*>(a.p.embed) + static_cast<int64_t>(id) * a.p.d * 2 : a.zeros, 0};
  }

  __device__ __forceinline__ uint32_t square_at(int m) const { return squares + (((count & 1) * 2 + 0) * kStepRows + m) * kWarps * 4; }
  __device__ __forceinline__ uint32_t peak_at(int m) const { return squares + (((count & 1) * 2 + 1) * kStepRows + m) * kWarps * 4; }

  __device__ __forceinline__ float rstd_of(const Task& t, int m, float inverse_d) const {
    if (t.norm == nullptr) return 1.f;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += load_shared_float(square_at(m) + w * 4);
    return rsqrtf(fmaf(sum, inverse_d, a.p.eps));
  }
  __device__ __forceinline__ float scale_of(const Task& t, int m, float rstd) const {
    float peak = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) peak = fmaxf(peak, load_shared_float(peak_at(m) + w * 4));
    // The quotient as a division rounds it, without a division's slow path.
    constexpr float kReciprocal = 1.f / kE4M3Max;
    const float most = peak * rstd, quotient = __fmul_rn(most, kReciprocal);
    const float exact = fmaf(fmaf(-kE4M3Max, quotient, most), kReciprocal, quotient);
    return fmaxf(most < INFINITY ? exact : quotient, kMinScale);
  }

  __device__ __forceinline__ uint32_t area_at() const { return sums + area.at * kWarps * a.p.rows * kUnit * 4; }
  __device__ __forceinline__ void pass_product(int product) {
    turn = next_turn(turn, a.cut[product].units);
    ++count;
  }
};

// One thread that loads: all pieces of the step that this CTA reads, in order.
struct Loader {
  const Args& a;
  const StepLayer* const table;
  Barriers barriers;
  uint32_t ring;
  uint64_t policy;
  Place stage, landed;
  int asked = 0;  // stages on their way

  __device__ __forceinline__ Loader(const Args& args, uint32_t base, const StepLayer* layers)
      : a(args), table(layers), barriers{base + args.barriers, args.stages}, ring(base) {
    // Weights leave the L2 first: what the CTAs exchange stays there.
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  }

  __device__ __forceinline__ void run() {
    int turn = 0;
#pragma unroll 1
    for (int i = 0; i <= a.p.layers * kStepHead; ++i) {
      const int layer = i / kStepHead, product = layer < a.p.layers ? i % kStepHead : kStepHead;
      turn = load(product, product == kStepHead ? a.p.head : table[layer].weight[product], turn);
    }
  }

  __device__ __forceinline__ bool waiting() const {
    int value;
    asm volatile("ld.volatile.shared.s32 %0, [%1];" : "=r"(value) : "r"(ring + a.waiting));
    return value != 0;
  }

  // Asked again at once: try_wait lets its thread sleep, and what it sleeps the memory has less to do (8B e4m3 2.256 instead of 2.220 ms).
  static __device__ __forceinline__ bool passed(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
  }

  __device__ __forceinline__ int load(int product, const void* weight, int turn) {
    const Cut cut = a.cut[product];
    const CUtensorMap* const whole = &a.map[product][0];
    const int from = static_cast<int>((static_cast<const uint8_t*>(weight) - cut.base) / cut.line);
    const int unit_lines = (product == kStepUp ? 4 : kUnit) * (cut.row_bytes / cut.line);
    for (int unit = first_unit(turn); unit < cut.units; unit += gridDim.x) {
      for (int offset = 0; offset < cut.row_bytes; offset += cut.chunk) {
        const int size = min(cut.chunk, cut.row_bytes - offset);
        while (!passed(barriers.empty(stage.at), stage.parity ^ 1)) {
        }
        for (const int most = waiting() ? a.flying_waiting : a.flying; asked >= most; --asked) {
          barrier_wait(barriers.full(landed.at), landed.parity);
          landed.next(a.stages);
        }
        ++asked;
        barrier_arrive_expect(barriers.full(stage.at), size * kUnit);
        copy(ring + stage.at * kStage, whole + (size < cut.chunk), barriers.full(stage.at), from + unit * unit_lines + offset / cut.line);
        stage.next(a.stages);
      }
    }
    return next_turn(turn, cut.units);
  }

  // 8 rows from this line on.
  __device__ __forceinline__ void copy(uint32_t to, const CUtensorMap* map, uint32_t barrier, int line) const {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %3, %3, %4}], [%2], "
        "%5;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(0), "r"(line), "l"(policy)
        : "memory");
  }
};

// A warp of the eight that multiply.
struct Consumer : Product {
  static constexpr int kSlots = 4;  // pieces of x that a lane asks for at a time

  int group, quad;  // a lane holds row `group` of eight of a stage, the `quad`-th 16 bytes of each step
  Place stage;

  // Where a lane finds its part of an even and of an odd step of 64 bytes in 1 KiB of a stage, and which row of it that is.
  struct Lines {
    uint32_t even, odd;
    int row;
  };
  // A stage holds lines of its eight rows one after the other. Those of 128 bytes are swizzled; what a quarter of a warp reads, parts of
  // two rows, lies in different banks if these are four apart. Lines of 64 bytes, for rows that end in one, need neither.
  __device__ __forceinline__ Lines lines_of(int line) const {
    const int own = group % 2 * 4 + group / 2;
    if (line == kLine) return {own * 128u + (quad ^ own) * 16u, own * 128u + ((4 + quad) ^ own) * 16u, own};
    return {lane * 16u, lane * 16u + 512u, group};
  }

  // Tells the loader that the CTA waits for values of others: what is on its way then, they queue behind.
  __device__ __forceinline__ void tell_waiting(int value) const {
    if (threadIdx.x == 0) asm volatile("st.volatile.shared.s32 [%0], %1;" ::"r"(ring + a.waiting), "r"(value) : "memory");
  }

  __device__ __forceinline__ Consumer(const Args& args, uint32_t base) : Product(args, base), group(lane / 4), quad(lane % 4) {}

  // --- x ---

  // Scales eight values of x, the first of them the `k`-th, by the norm's weights, sums the squares of x, keeps the largest magnitude of
  // the results. The norm is compared with null as it is given: of a choice between null and an address within it, ptxas 13.0 made a
  // comparison of a register whose zeros were still on their way, and a load from there.
  static __device__ __forceinline__ void scale_eight(float (&v)[8], const float* norm, int k, float& square, float& peak) {
    if (norm != nullptr) {
      const float4* const g = reinterpret_cast<const float4*>(norm + k);
      const float4 lo = __ldg(g), hi = __ldg(g + 1);
      const float w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        square = fmaf(v[i], v[i], square);
        v[i] *= w[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) peak = fmaxf(peak, fabsf(v[i]));
  }
  static __device__ __forceinline__ void unpack(const uint4& raw, float (&v)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = from_bf16_pair(words[i]);
      v[2 * i] = two.x, v[2 * i + 1] = two.y;
    }
  }

  // The p-th 16 bytes of x that this lane takes for its warp, of a row in shared memory or elsewhere; -1: it has none there.
  template <int Width>
  __device__ __forceinline__ int piece_at(const Cut& cut, int p) const {
    constexpr int kTimes = 2 / Width;  // at most 512 bytes at a time: all lanes once
    const int within = p % kTimes * 512 + lane * 16, share = cut.chunk / kWarps * kTimes;
    const int at = p / kTimes * cut.chunk * kTimes + warp * share + within;
    return within < share && at < cut.row_bytes * kTimes ? at : -1;
  }

  // This warp's part of x to shared memory: bf16, scaled by the norm's weights; for e4m3 weights quantised, as fp16. So many pieces at a
  // time, of all rows alike: what is asked for one after the other waits for a trip through the L2 each.
  template <bool Quantise>
  __device__ __forceinline__ void take_x(const Task& t, const Cut& cut) {
    constexpr int kWidth = Quantise ? 1 : 2;  // bytes of an element of the weight
    const int pieces = (cut.row_bytes + cut.chunk - 1) / cut.chunk * (2 / kWidth), pitch = pitch_of(cut.row_bytes / kWidth * 2);
    if (t.norm != nullptr) {
      for (int p = 0; p < pieces; ++p) touch_norm(t.norm, piece_at<kWidth>(cut, p));
    }
    const int shift = a.p.rows == 1 ? 0 : a.p.rows == 2 ? 1 : 2, mask = (1 << shift) - 1;  // slot i is row i & mask
    Statistics statistics{};
    const uint8_t* from[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) from[i] = source(t.x, min(i & mask, a.p.rows - 1)).base;
    const uint32_t flip = t.x.base != nullptr ? ~0u : 0;
    for (int first = 0; first < pieces; first += kSlots >> shift) {
      uint4 raw[kSlots];
      int at[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        const int p = first + (i >> shift);
        at[i] = p < pieces && (i & mask) < a.p.rows ? piece_at<kWidth>(cut, p) : -1;
      }
      wait_pieces(raw, from, at, flip);
      if (first == 0) named_sync(1, kConsumers);  // all warps have used the x of the product before
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        if (at[i] < 0) continue;
        if (Quantise || t.norm != nullptr) {
          float v[8];
          unpack(raw[i], v);
          scale_eight(v, t.norm, at[i] / 2, statistics.square[i], statistics.peak[i]);
          if constexpr (!Quantise) {
            raw[i] = {bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7])};
          }
        }
        if constexpr (Quantise) {
          store_shared_16(x + (i & mask) * pitch + at[i], raw[i]);
        } else {
          store_x(x + (i & mask) * pitch + at[i], raw[i]);
        }
      }
    }
    if (Quantise || t.norm != nullptr) share_statistics(statistics, mask);
    if constexpr (Quantise) {
      named_sync(1, kConsumers);
      quantise_x(t, cut, pieces, pitch);
    }
    __syncwarp();
  }

  struct Statistics {
    float square[kSlots], peak[kSlots];
  };
  __device__ __forceinline__ void share_statistics(const Statistics& statistics, int mask) const {
#pragma unroll
    for (int m = 0; m < kStepRows; ++m) {
      if (m >= a.p.rows) break;
      float square = 0.f, peak = 0.f;
#pragma unroll
      for (int i = m; i < kSlots; ++i) {
        if ((i & mask) == m) square += statistics.square[i], peak = fmaxf(peak, statistics.peak[i]);
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        square += __shfl_xor_sync(0xffffffffu, square, offset);
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, offset));
      }
      if (lane == 0) store_shared_float(square_at(m) + warp * 4, square), store_shared_float(peak_at(m) + warp * 4, peak);
    }
  }

  // In place: x to the nearest e4m3 of its row's scale, as fp16.
  __device__ __forceinline__ void quantise_x(const Task& t, const Cut& cut, int pieces, int pitch) const {
    for (int m = 0; m < a.p.rows; ++m) {
      const float rstd = rstd_of(t, m, a.inverse_d), inverse = __frcp_rn(scale_of(t, m, rstd));
      for (int p = 0; p < pieces; ++p) {
        const int at = piece_at<1>(cut, p);
        if (at < 0) continue;
        float v[8], square = 0.f, peak = 0.f;
        unpack(load_shared_16(x + m * pitch + at), v);
        scale_eight(v, t.norm, at / 2, square, peak);
        uint32_t out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = widen_e4m3(to_e4m3x2(v[2 * i] * rstd * inverse, v[2 * i + 1] * rstd * inverse));
        store_x(x + m * pitch + at, {out[0], out[1], out[2], out[3]});
      }
    }
  }

  // Brings the norm's weights to the L1 while x is not there yet.
  static __device__ __forceinline__ void touch_norm(const float* norm, int at) {
    if (at < 0) return;
    [[maybe_unused]] float word;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(word) : "l"(norm + at / 2));
  }

  // --- sums ---

  // Of eight values of x the words 0 and 2 lie before 1 and 3: see `multiply`.
  static __device__ __forceinline__ void store_x(uint32_t to, const uint4& v) { store_shared_16(to, {v.x, v.z, v.y, v.w}); }

  // 64 bytes of eight rows of the weight at `w`, x of the same k at `u` (of a lane).
  template <bool Quantised>
  static __device__ __forceinline__ void multiply_step(float (&first)[4], float (&second)[4], uint32_t w, uint32_t u) {
    const uint4 v = load_shared_16(w);
    if constexpr (Quantised) {
      const uint2 lo = load_shared_8(u), hi = load_shared_8(u + 16);
      multiply<__half>(first, widen_e4m3(v.x), widen_e4m3(v.x >> 16), widen_e4m3(v.y), widen_e4m3(v.y >> 16), lo);
      multiply<__half>(second, widen_e4m3(v.z), widen_e4m3(v.z >> 16), widen_e4m3(v.w), widen_e4m3(v.w >> 16), hi);
    } else {
      multiply<__nv_bfloat16>(first, v.x, v.y, v.z, v.w, load_shared_8(u));
    }
  }

  // This warp's part of one unit.
  template <bool Quantised>
  __device__ __forceinline__ void sum_unit(float (&acc)[2][4], const Cut& cut, const Lines& lines, uint32_t u) {
    constexpr int kTimes = Quantised ? 2 : 1, kStepX = kStepBytes * kTimes;  // bytes of x for a byte of the weight
    const int share = cut.chunk / kWarps, mine = warp * share, first = mine / kStepBytes;
    for (int offset = 0; offset < cut.row_bytes; offset += cut.chunk) {
      barrier_wait(barriers.full(stage.at), stage.parity);
      const int steps = min(share, cut.row_bytes - offset - mine) / kStepBytes;  // rows are multiples of 64 bytes
      const uint32_t from = ring + stage.at * kStage + first / 2 * 1024, at = u + offset * kTimes;
      if (steps == 4) {  // then `first` is even
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          multiply_step<Quantised>(acc[s % 2], acc[1 - s % 2], from + s / 2 * 1024 + (s % 2 == 0 ? lines.even : lines.odd),
                                   at + s * kStepX);
        }
      } else {
        for (int s = 0; s < steps; ++s) {
          const int step = first % 2 + s;
          multiply_step<Quantised>(acc[0], acc[1], from + step / 2 * 1024 + (step % 2 == 0 ? lines.even : lines.odd), at + s * kStepX);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.empty(stage.at));
      stage.next(a.stages);
    }
  }

  // Rows 0 to 7 of a tile are of the first half of k and count for columns 0 to 3, the rest for the rest.
  __device__ __forceinline__ void store_sums(const float (&acc)[2][4], int row) const {
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = quad < 2 ? acc[0][i] + acc[1][i] : acc[0][i + 2] + acc[1][i + 2];
      sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
      const int m = 2 * quad + i;
      if (m < a.p.rows) store_shared_float(area_at() + ((warp * a.p.rows + m) * kUnit + row) * 4, sum[i]);
    }
  }

  // This warp's part of all units of the CTA in a product.
  template <bool Quantised>
  __device__ __forceinline__ void run(const Task& t, int product) {
    constexpr int kTimes = Quantised ? 2 : 1;
    const Cut cut = a.cut[product];
    const int first = first_unit(turn);
    const Lines lines = lines_of(cut.line);
    tell_waiting(1);
    if (first < cut.units) take_x<Quantised>(t, cut);
    tell_waiting(0);
    const int row = min(group % 4, a.p.rows - 1);  // what the columns of rows that are not there give is not used
    const uint32_t u =
        x + row * pitch_of(cut.row_bytes * kTimes) + warp * (cut.chunk / kWarps) * kTimes + quad * 16 * kTimes + group / 4 * 8;
    for (int unit = first; unit < cut.units; unit += gridDim.x) {
      float acc[2][4] = {};
      sum_unit<Quantised>(acc, cut, lines, u);
      barrier_wait(barriers.added(area.at), area.parity ^ 1);
      store_sums(acc, lines.row);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.summed(area.at));
      area.next(kAreas);
    }
    pass_product(product);
  }
};

// A warp of the three that finish sums: it takes every third unit of the CTA, through all products.
struct Finisher : Product {
  int mine;        // its number among these warps
  int passed = 0;  // units of the CTA in all products before

  __device__ __forceinline__ Finisher(const Args& args, uint32_t base) : Product(args, base), mine(warp - kWarps - 1) {}

  // What the end of a unit reads beside the sums, asked for a unit ahead.
  struct Extra {
    float2 scale, up_scale;
    uint32_t residual, bias;  // residual: as it is stored
  };
  struct Column {
    int m, pair, n;  // n: column of the output
    bool mine;
  };
  __device__ __forceinline__ Column column_of(int product, int unit) const {
    const int pairs = product == kStepUp ? 2 : 4, m = lane / pairs, pair = lane % pairs;
    return {m, pair, (unit * pairs + pair) * 2, m < a.p.rows};
  }
  __device__ __forceinline__ Extra ask(const Task& t, int product, int unit) const {
    Extra e{{1.f, 1.f}, {1.f, 1.f}, 0, 0};
    const Column at = column_of(product, unit);
    if (!at.mine || unit >= a.cut[product].units) return e;
    if (t.weight_scale != nullptr) {
      e.scale = __ldg(reinterpret_cast<const float2*>(t.weight_scale + at.n));
      if (product == kStepUp) e.up_scale = __ldg(reinterpret_cast<const float2*>(t.weight_scale + a.p.ffn + at.n));
    }
    if (t.bias != nullptr) e.bias = __ldg(reinterpret_cast<const uint32_t*>(t.bias + at.n));
    if (t.adds) e.residual = load_relaxed(source(t.residual, at.m).base + at.n * 2);
    return e;
  }

  __device__ __forceinline__ float2 total_of(uint32_t area, int m, int local) const {
    float2 sum{};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 one = load_shared_pair(area + ((w * a.p.rows + m) * kUnit + local) * 4);
      sum.x += one.x, sum.y += one.y;
    }
    return sum;
  }

  __device__ __forceinline__ void finish(const Task& t, int product, int unit, const Extra& e, float factor) const {
    const Column at = column_of(product, unit);
    if (!at.mine) return;
    float2 v = total_of(area_at(), at.m, at.pair * 2);
    v.x *= factor * e.scale.x, v.y *= factor * e.scale.y;
    if (product == kStepUp) {
      float2 up = total_of(area_at(), at.m, at.pair * 2 + 4);
      up.x *= factor * e.up_scale.x, up.y *= factor * e.up_scale.y;
      v.x = gemm::activate(a.p.act, v.x) * up.x, v.y = gemm::activate(a.p.act, v.y) * up.y;
    }
    const float2 bias = from_bf16_pair(e.bias);
    v.x += bias.x, v.y += bias.y;
    if (t.adds) {
      const Source from = source(t.residual, at.m);
      uint32_t word = e.residual;  // asked for before x, so it may not have been there
      while (word == 0 && from.flip != 0) word = load_relaxed(from.base + at.n * 2);
      const float2 residual = from_bf16_pair(word ^ from.flip);
      v.x += residual.x, v.y += residual.y;
    }
    if (t.final) {
      *reinterpret_cast<uint32_t*>(t.to.base + at.m * t.to.stride + static_cast<int64_t>(at.n) * 2) = bf16_pair(v.x, v.y);
    } else {
      publish(t.to.base + at.m * t.to.stride + at.n * 2, v.x, v.y);
    }
  }

  template <bool Quantised>
  __device__ __forceinline__ void run(const Task& t, int product) {
    const int units = a.cut[product].units, step = kFinishers * static_cast<int>(gridDim.x);
    int unit = first_unit(turn);
    const int count = unit < units ? (units - 1 - unit) / static_cast<int>(gridDim.x) + 1 : 0;
    const int skip = (mine + kFinishers - passed % kFinishers) % kFinishers;
    int at = passed + skip;
    unit += skip * static_cast<int>(gridDim.x);
    Extra extra = ask(t, product, unit);
    const int m = column_of(product, unit).m;
    float factor = 0.f;
    for (; unit < units; unit += step, at += kFinishers) {
      const Extra next = ask(t, product, unit + step);
      area = {at % kAreas, at / kAreas % 2};
      barrier_wait(barriers.summed(area.at), area.parity);
      if (factor == 0.f && m < a.p.rows) {  // of all units: the statistics of x are there with the first sums
        const float rstd = rstd_of(t, m, a.inverse_d);
        factor = Quantised ? scale_of(t, m, rstd) : rstd;
      }
      finish(t, product, unit, extra, factor);
      __syncwarp();
      if (lane == 0) barrier_arrive(barriers.added(area.at));
      extra = next;
    }
    passed += count;
    pass_product(product);
  }
};

}  // namespace pyllm::step
