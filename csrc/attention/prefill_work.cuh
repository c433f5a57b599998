// How prefill shares out its work. A tile is M query rows of one sequence and one head. Persistent CTAs take tiles by number from a counter
// in global memory; which tile a number means follows from q_starts and the key lengths alone, so nothing is planned on the host.
// Order: runs of sequences and chunks of KV heads whose keys and values fit in L2 together, one after the other; inside a chunk the tiles
// with the most keys first (a tile ends at one of the N-key blocks: its level), so that the last tiles to start are the shortest; heads
// innermost, so that the CTAs of a GQA group read the same keys at the same time.
#pragma once
#include "attention/prefill_attention.h"

namespace pyllm::attention {

constexpr int kL2Budget = 24 << 20;  // bytes of keys and values of a chunk: half of an H200's L2

// The counter: the upper bits say which launch it belongs to, since its memory comes uninitialised. Until the first CTA has written it,
// the others see something else there.
constexpr int kCountBits = 24;

// Everything a tile's producer and consumers need. first < 0: no more tiles.
struct PrefillTile {
  int first;    // row of its sequence
  int rows;     // of the sequence: n
  int length;   // keys of the sequence: L
  int q_start;  // row of q of the sequence's first
  int head;
  int b;
  int k_start;   // row of k of the sequence's first key (contiguous keys)
  int low, end;  // blocks of N keys [low, end) that some row of the tile sees
};

// Where a walk stands, in shared memory: the producer has few registers.
struct PrefillWalkState {
  int budget;                          // keys of one KV head in a chunk
  int run_before, run_first, run_end;  // tiles before the run; its sequences
  int blocks, top, chunk_heads;        // of the run: tiles of one head, highest level, heads of a chunk
  int chunk, level, below;             // now: chunk, level, the next lower level that has tiles
  int before, count;                   // tiles of one head above the level and in it
};

// Used by all lanes of one converged warp; the lanes write the same values, with a warp-wide operation between two writes of one field.
template <int M, int N>
class PrefillWalk {
 public:
  __device__ __forceinline__ PrefillWalk(const PrefillAttentionParams& p, int item, PrefillWalkState* state) : p_(p), s_(*state) {
    const int head_bytes = (p.dim + p.v_dim) * item;
    s_.budget = kL2Budget / head_bytes;
    s_.run_before = 0;
    __syncwarp();
    next_run(0);
  }

  // By a whole converged warp. Numbers of one walk rise. One lane calls post(tile). False: there is no such tile, and nobody did.
  template <class Post>
  __device__ __forceinline__ bool find(int number, Post&& post) {
#pragma unroll 1
    for (int upto; number >= (upto = s_.run_before + s_.blocks * p_.heads);) {
      const int next = s_.run_end;
      if (next >= p_.batch) return false;
      __syncwarp();
      s_.run_before = upto;
      next_run(next);
    }
    const int within = number - s_.run_before, full = s_.blocks * s_.chunk_heads, chunk = within / full;
    const int heads = min(s_.chunk_heads, p_.heads - chunk * s_.chunk_heads);
    const int block = (within - chunk * full) / heads;
    const int head = chunk * s_.chunk_heads + (within - chunk * full) % heads;
    if (chunk != s_.chunk) {
      __syncwarp();
      s_.chunk = chunk;
      s_.level = s_.top;
      s_.before = 0;
      measure();
    }
#pragma unroll 1
    for (int upto; block >= (upto = s_.before + s_.count);) {
      const int below = s_.below;
      __syncwarp();
      s_.before = upto;
      s_.level = below;
      measure();
    }
    pick(block - s_.before, head, post);
    return true;
  }

  // Of all runs; known once `find` has found nothing.
  __device__ __forceinline__ int total() const { return s_.run_before + s_.blocks * p_.heads; }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  struct Sequence {
    int q_start, rows, length, blocks;
  };
  __device__ __forceinline__ Sequence sequence(int b, int end) const {
    Sequence s{0, 0, 0, 0};
    if (b >= end) return s;
    s.q_start = p_.q_starts[b];
    s.rows = p_.q_starts[b + 1] - s.q_start;
    s.length = p_.kv_starts != nullptr ? p_.kv_starts[b + 1] - p_.kv_starts[b] : p_.kv_lens[b];
    s.blocks = s.rows > p_.skip_rows ? (s.rows + M - 1) / M : 0;
    return s;
  }
  // The level of tile m: blocks of keys up to the last that its rows see.
  __device__ __forceinline__ int level_of(const Sequence& s, int m) const {
    const int keys = p_.causal ? min(s.length, s.length - s.rows + (m + 1) * M) : s.length;
    return max(0, keys + N - 1) / N;
  }
  // How many tiles of a sequence have at least this level.
  __device__ __forceinline__ int reaching(const Sequence& s, int level) const {
    if (level <= 0) return s.blocks;
    if ((s.length + N - 1) / N < level) return 0;
    const int over = (level - 1) * N - (s.length - s.rows);
    return p_.causal && over > 0 ? max(0, s.blocks - over / M) : s.blocks;
  }

  // The next sequences whose keys of one KV head fit in the budget (one sequence at least), and how many heads then go together.
  __device__ __forceinline__ void next_run(int first) {
    int keys = 0, blocks = 0, top = 0, end = first;
#pragma unroll 1
    for (int taken = 32; taken == 32 && end < p_.batch; end += taken) {
      const int b = end + lane();
      const Sequence s = sequence(b, p_.batch);
      int upto = s.blocks > 0 ? s.length : 0;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, upto, offset);
        if (lane() >= offset) upto += other;
      }
      const bool fits = keys + upto <= s_.budget || b == first;
      const uint32_t over = __ballot_sync(0xffffffffu, !fits);
      taken = over == 0 ? 32 : __ffs(over) - 1;
      blocks += __reduce_add_sync(0xffffffffu, lane() < taken ? s.blocks : 0);
      top = max(top, __reduce_max_sync(0xffffffffu, lane() < taken && s.blocks > 0 ? level_of(s, s.blocks - 1) : 0));
      if (taken > 0) keys += __shfl_sync(0xffffffffu, upto, taken - 1);
    }
    s_.blocks = blocks;
    s_.top = top;
    s_.run_first = first;
    s_.run_end = min(end, p_.batch);
    s_.chunk_heads = p_.group * max(1, min(p_.kv_heads, s_.budget / max(keys, 1)));
    s_.chunk = -1;
    __syncwarp();
  }

  // s_.count: tiles of this level in the run; s_.below: the next lower level that has any.
  __device__ __forceinline__ void measure() {
    __syncwarp();
    const int end = s_.run_end;
    int count = 0, below = 0;
#pragma unroll 1
    for (int b = s_.run_first + lane(); b < end; b += 32) {
      const Sequence s = sequence(b, end);
      const int reach = reaching(s, s_.level);
      count += reach - reaching(s, s_.level + 1);
      if (s.blocks > reach) below = max(below, level_of(s, s.blocks - reach - 1));
    }
    s_.count = __reduce_add_sync(0xffffffffu, count);
    s_.below = __reduce_max_sync(0xffffffffu, below);
    __syncwarp();
  }

  template <class Post>
  __device__ __forceinline__ void pick(int index, int head, Post&& post) const {
    const int end = s_.run_end;
#pragma unroll 1
    for (int base = s_.run_first; base < end; base += 32) {
      const Sequence s = sequence(base + lane(), end);
      const int above = reaching(s, s_.level + 1), own = reaching(s, s_.level) - above;
      int upto = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, upto, offset);
        if (lane() >= offset) upto += other;
      }
      const int all = __shfl_sync(0xffffffffu, upto, 31);
      if (index >= all) {
        index -= all;
        continue;
      }
      if (index < upto && index >= upto - own) {
        PrefillTile tile;
        tile.first = (s.blocks - above - 1 - (index - (upto - own))) * M;
        tile.rows = s.rows;
        tile.length = s.length;
        tile.q_start = s.q_start;
        tile.head = head;
        tile.b = base + lane();
        tile.k_start = p_.kv_starts != nullptr ? p_.kv_starts[tile.b] : 0;
        tile.end = s_.level;
        tile.low = p_.window > 0 ? min(max(s.length - s.rows + tile.first - p_.window + 1, 0) / N, tile.end) : 0;
        post(tile);
      }
      __syncwarp();
      return;
    }
  }

  const PrefillAttentionParams& p_;
  volatile PrefillWalkState& s_;
};

// The numbers of a CTA's tiles: its own index first, then whatever the counter says. By one lane.
class PrefillCounter {
 public:
  __device__ __forceinline__ PrefillCounter(const PrefillAttentionParams& p, bool chosen) : p_(p) {
    if (blockIdx.x != 0 || !chosen || p_.second) return;
    p_.schedule[1] = 0;
    __threadfence();
    atomicExch(p_.schedule, p_.launch << kCountBits | p_.first_ctas);
  }
  __device__ __forceinline__ int next() {
    for (;;) {
      const unsigned long long seen = atomicAdd(p_.schedule, 1ull);
      if (seen >> kCountBits == p_.launch) return static_cast<int>(seen & ((1u << kCountBits) - 1));
      __nanosleep(100);
    }
  }
  // number: past the last of `total` tiles, from the counter. Each CTA draws one such number and nothing after it, so the last of them all
  // is known; it takes the launch's mark away, since a replayed graph brings the same mark again.
  __device__ __forceinline__ void finish(int number, int total) {
    if (p_.all_ctas > p_.first_ctas && !p_.second) atomicExch(p_.schedule + 1, p_.launch << kCountBits | total);
    if (number == max(total, p_.first_ctas) + p_.all_ctas - 1) atomicExch(p_.schedule, 0ull);
  }
  // For CTAs of a second launch that come late: `total`, if one of the first launch has found it, else -1. Behind `next`.
  __device__ __forceinline__ int known_total() const {
    __threadfence();
    const unsigned long long seen = *static_cast<volatile unsigned long long*>(p_.schedule + 1);
    return seen >> kCountBits == p_.launch ? static_cast<int>(seen & ((1u << kCountBits) - 1)) : -1;
  }

 private:
  const PrefillAttentionParams& p_;
};

}  // namespace pyllm::attention
