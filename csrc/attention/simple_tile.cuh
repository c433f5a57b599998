// What a CTA of simple_attention.cuh works on: which rows of which sequence, which keys, and how both come to shared memory.
#pragma once
#include "attention/mma.cuh"
#include "attention/simple_params.cuh"

namespace pyllm::attention {

constexpr int kSimpleThreads = 128;

__device__ __forceinline__ uint32_t pack_two(float lo, float hi, __half) {
  const __half2 h = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t pack_two(float lo, float hi, __nv_bfloat16) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&h);
}

// A tile of rows and the keys of this CTA.
struct SimpleTile {
  int b;                  // B: the rows past the last sequence
  int q_start, n, L;      // of the sequence: first row of q, rows, keys
  int key_start;          // contiguous keys: row of the first
  int first_row;          // of the tile, in n * G
  int low, high;          // keys that some row of the tile sees
  int all_low, all_high;  // those that every row sees, but for a custom mask
  int begin, end;         // those of this split

  // q_starts says where the last sequence ends; the sequence after it is what is left of T.
  static __device__ __forceinline__ int rows_of(const SimpleAttentionParams& p, int b) {
    return (b < p.batch ? p.q_starts[b + 1] : static_cast<int>(p.tokens)) - p.q_starts[b];
  }

  // False where no tile is left for this CTA. By all threads.
  __device__ __forceinline__ bool find(const SimpleAttentionParams& p, int rows, int* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;
    for (int base = 0; base <= p.batch; base += kSimpleThreads) {
      const int mine = base + static_cast<int>(threadIdx.x);
      const int tiles = mine <= p.batch ? (rows_of(p, mine) * p.group + rows - 1) / rows : 0;
      int upto = tiles;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, upto, offset);
        if (lane >= offset) upto += other;
      }
      if (lane == 31) scratch[warp] = upto;
      __syncthreads();
      int total = before;
#pragma unroll
      for (int w = 0; w < kSimpleThreads / 32; ++w) {
        if (w == warp) upto += total;
        total += scratch[w];
      }
      const int wanted = static_cast<int>(blockIdx.x);
      if (wanted < upto && wanted >= upto - tiles) {
        scratch[4] = mine;
        scratch[5] = upto - 1 - wanted;  // causal: the last rows of a sequence see the most keys and come first
      }
      __syncthreads();
      before = total;
      if (wanted < total) {
        b = scratch[4];
        first_row = scratch[5] * rows;
        return true;
      }
    }
    return false;
  }

  __device__ __forceinline__ void keys(const SimpleAttentionParams& p, int rows, int key_tile) {
    q_start = p.q_starts[b];
    n = rows_of(p, b);
    L = key_start = 0;
    if (b < p.batch) {
      if (p.page_table != nullptr) {
        L = p.kv_lens[b];
      } else {
        key_start = p.kv_starts[b];
        L = p.kv_starts[b + 1] - key_start;
      }
    }
    const int first = first_row / p.group, last = min(n - 1, (first_row + rows - 1) / p.group);
    high = p.causal ? max(0, min(L, L - n + last + 1)) : L;
    low = p.window > 0 ? max(0, L - n + first - p.window + 1) : 0;
    all_high = p.causal ? min(L, L - n + first + 1) : L;
    all_low = p.window > 0 ? L - n + last - p.window + 1 : 0;
    begin = low / key_tile * key_tile;
    const int tiles = high > begin ? (high - begin + key_tile - 1) / key_tile : 0;
    const int each = (tiles + p.splits - 1) / p.splits;
    begin += static_cast<int>(blockIdx.z) * each * key_tile;
    end = min(high, begin + each * key_tile);
  }
};

// Calls copy(row, chunk) for the Count * Chunks pieces of a tile, by all threads. Where it can, a thread keeps its chunk.
template <int Count, int Chunks, class Copy>
__device__ __forceinline__ void for_pieces(Copy copy) {
  if constexpr (kSimpleThreads % Chunks == 0 && Count % (kSimpleThreads / Chunks) == 0) {
    const int row = static_cast<int>(threadIdx.x) / Chunks, chunk = static_cast<int>(threadIdx.x) % Chunks;
#pragma unroll
    for (int i = 0; i < Count; i += kSimpleThreads / Chunks) copy(row + i, chunk);
  } else {
    for (int i = static_cast<int>(threadIdx.x); i < Count * Chunks; i += kSimpleThreads) copy(i / Chunks, i % Chunks);
  }
}

// Rows [0, Count) of Chunks * 16 bytes, of which the first Filled chunks hold data, to shared memory. offset(row): bytes from `base` to a
// row, a valid address also where seen(row) is false and zeros take the row's place.
template <int Count, int Chunks, int Filled, class Offset, class Seen>
__device__ __forceinline__ void copy_rows(uint32_t to, const char* base, Offset offset, Seen seen) {
  for_pieces<Count, Chunks>([&](int row, int chunk) {
    const bool filled = Filled == Chunks || chunk < Filled;
    copy_async(to + row * ((Chunks | 1) * 16) + chunk * 16, base + (filled ? chunk * 16 : 0) + offset(row), filled && seen(row) ? 16 : 0);
  });
}

// Two e4m3 to two values of T, exactly.
__device__ __forceinline__ __half2 widen_two(uint32_t two) {
#if __CUDA_ARCH__ >= 890
  uint32_t h;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(static_cast<uint16_t>(two)));
  return *reinterpret_cast<const __half2*>(&h);
#else
  // Exponent and mantissa of e4m3, moved up by 7 bits, are those of an fp16 number 2^8 smaller.
  const uint32_t spread = (two & 0xffu) | (two & 0xff00u) << 8, magnitude = spread & 0x007f007fu;
  uint32_t h = (spread & 0x00800080u) << 8 | magnitude << 7;
  const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&h), __float2half2_rn(256.f));
  h = *reinterpret_cast<const uint32_t*>(&x);
  if ((magnitude & 0xffffu) == 0x7fu) h |= 0x7fffu;  // NaN
  if (magnitude >> 16 == 0x7fu) h |= 0x7fff0000u;
  return *reinterpret_cast<const __half2*>(&h);
#endif
}
__device__ __forceinline__ uint32_t widened(uint32_t two, __half) {
  const __half2 h = widen_two(two);
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ uint32_t widened(uint32_t two, __nv_bfloat16) {
  const float2 f = __half22float2(widen_two(two));
  return pack_two(f.x, f.y, __nv_bfloat16{});
}

// As copy_rows, from rows of Dim e4m3 numbers.
template <class T, int Count, int Dim, class Offset, class Seen>
__device__ __forceinline__ void widen_rows(uint32_t to, const char* base, Offset offset, Seen seen) {
  static_assert(Dim % 16 == 0, "rows of e4m3 are multiples of 16 bytes");
  for_pieces<Count, Dim / 16>([&](int row, int chunk) {
    const uint4 raw = seen(row) ? *reinterpret_cast<const uint4*>(base + chunk * 16 + offset(row)) : uint4{0, 0, 0, 0};
    const uint32_t four[4] = {raw.x, raw.y, raw.z, raw.w}, at = to + row * ((Dim / 8 | 1) * 16) + chunk * 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t a = four[2 * half], b = four[2 * half + 1];
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at + half * 16), "r"(widened(a, T{})), "r"(widened(a >> 16, T{})),
                   "r"(widened(b, T{})), "r"(widened(b >> 16, T{}))
                   : "memory");
    }
  });
}

// Where the keys of a tile are. One thread looks up one row of K or of V for all: it asks for the page a step ahead, before the products,
// and puts the answer into shared memory behind them. Two tiles are in use at a time.
template <int Keys, bool Fp8>
struct KeyPlaces {
  int64_t offsets[2][2][Keys];  // [tile][K, V]: bytes from the head's first row; 0 where nobody sees the key

  static __device__ __forceinline__ int64_t look_up(const SimpleAttentionParams& p, const SimpleTile& tile, int key) {
    if (threadIdx.x >= 2 * Keys) return 0;
    const bool value = threadIdx.x >= Keys;
    const int at = key + static_cast<int>(threadIdx.x) % Keys;
    if (at < tile.low || at >= tile.high) return 0;
    const int64_t step = value ? p.v_token_stride : p.k_token_stride;
    if (p.page_table == nullptr) return (static_cast<int64_t>(tile.key_start) + at) * step * (Fp8 ? 1 : 2);
    const int64_t page = p.page_table[tile.b * p.table_stride + (at >> p.page_shift)];
    return (page * (value ? p.v_page_stride : p.k_page_stride) + (at & ((1 << p.page_shift) - 1)) * step) * (Fp8 ? 1 : 2);
  }
  __device__ __forceinline__ void put(int which, int64_t offset) {
    if (threadIdx.x < 2 * Keys) offsets[which][threadIdx.x / Keys][threadIdx.x % Keys] = offset;
  }
};

// Keys (or values) [key, key + Count); `base`: of this CTA's KV head.
template <class T, bool Fp8, int Count, int Dim>
__device__ __forceinline__ void copy_keys(const SimpleTile& tile, int key, uint32_t to, const char* base, const int64_t (&offsets)[Count]) {
  const int from = tile.low - key;
  const auto count = static_cast<unsigned>(tile.high - tile.low);
  const auto offset = [&](int row) { return offsets[row]; };
  const auto seen = [&](int row) { return static_cast<unsigned>(row - from) < count; };
  if constexpr (Fp8) {
    widen_rows<T, Count, Dim>(to, base, offset, seen);
  } else {
    copy_rows<Count, (Dim + 15) / 16 * 2, Dim / 8>(to, base, offset, seen);
  }
}

}  // namespace pyllm::attention
