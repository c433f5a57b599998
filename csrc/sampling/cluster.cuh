// A thread-block cluster that works on one row: exchanges of one slot per CTA, block reductions, and the total order of tokens.
// Exchanges go by st.async into the peers' shared memory, each with its mbarrier: a cluster barrier that releases memory contains a
// MEMBAR.GPU, and an exchange by it took 1.1 us instead of 0.4.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace pyllm::sampling {

constexpr int kMaxWarps = 16;
constexpr int kMaxCluster = 16;
constexpr uint32_t kAll = 0xffffffffu;

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
// Address of the same shared-memory variable in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t peer(const void* local, uint32_t rank) {
  uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(shared_address(local)), "r"(rank));
  return out;
}
__device__ __forceinline__ uint32_t load_peer(const uint32_t* local, uint32_t rank) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(peer(local, rank)) : "memory");
  return x;
}
__device__ __forceinline__ uint64_t load_peer(const uint64_t* local, uint32_t rank) {
  uint64_t x;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(x) : "r"(peer(local, rank)) : "memory");
  return x;
}
__device__ __forceinline__ void store_peer(uint64_t* local, uint32_t rank, uint64_t x) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(peer(local, rank)), "l"(x) : "memory");
}
// Stores that count their bytes at the peer's mbarrier `ready`.
__device__ __forceinline__ void send(void* local, uint64_t* ready, uint32_t rank, uint64_t x) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(peer(local, rank)), "l"(x),
               "r"(peer(ready, rank))
               : "memory");
}
__device__ __forceinline__ void send(void* local, uint64_t* ready, uint32_t rank, const uint4& x) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(peer(local, rank)),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(peer(ready, rank))
               : "memory");
}

// Read again at each use: what is computed from threadIdx would stay in registers for the whole kernel.
__device__ __forceinline__ uint32_t thread_id() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(id));
  return id;
}

// Order-preserving integer of a float; -0 equals +0, NaN is the largest.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_order_key(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Tokens as one integer each; the larger comes first: value descending, then id ascending. Never 0, which stands for "none".
__device__ __forceinline__ uint64_t place_of(float x, uint32_t id) { return static_cast<uint64_t>(order_key(x)) << 32 | ~id; }
__device__ __forceinline__ uint32_t id_of(uint64_t place) { return ~static_cast<uint32_t>(place); }
__device__ __forceinline__ float value_of(uint64_t place) { return from_order_key(static_cast<uint32_t>(place >> 32)); }

// max that keeps NaN: the row's maximum doubles as its NaN check.
__device__ __forceinline__ float max_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Sum over the warp, in all lanes; x < 2^54.
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
  constexpr uint32_t kLow = (1u << 27) - 1;
  const uint32_t low = __reduce_add_sync(kAll, static_cast<uint32_t>(x) & kLow);
  return (static_cast<uint64_t>(__reduce_add_sync(kAll, static_cast<uint32_t>(x >> 27))) << 27) + low;
}
// Sum over this lane and those before it.
__device__ __forceinline__ uint64_t warp_scan(uint64_t x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t left = __shfl_up_sync(kAll, x, offset);
    if (threadIdx.x % 32 >= offset) x += left;
  }
  return x;
}
// The lane in whose share of the masses `at` lies, given its share and the scan of the shares; `at` becomes the offset in that share.
__device__ __forceinline__ uint32_t find_share(uint64_t share, uint64_t scan, uint64_t& at) {
  const uint32_t lane = __popc(__ballot_sync(kAll, at >= scan));
  at -= __shfl_sync(kAll, scan - share, lane);
  return lane;
}

// What one CTA tells the others at an exchange.
struct alignas(16) Slot {
  uint64_t a, b;
};

// Each kind of exchange has its slots and its mbarrier, so that a fast CTA that already publishes the next one never overwrites what a slow
// one still reads: between two exchanges of one kind there is always one of another kind, or a cluster barrier.
enum SlotKind { kTopSlot, kGatherSlot, kCountSlot, kMassSlot, kDrawnSlot, kLastSlot, kSlotKinds, kKeys = kSlotKinds, kList, kReadyKinds };

struct Exchange {
  Slot slots[kSlotKinds][kMaxCluster];
  uint64_t parts[2][kMaxWarps];
  alignas(16) uint64_t ready[kReadyKinds];
};

struct Span {
  uint32_t min, max;
};

template <int kThreads>
class Cluster {
 public:
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= kMaxWarps && 32 % kWarps == 0);

  // Ends without a barrier: open() before the first exchange.
  __device__ explicit Cluster(Exchange& exchange) : exchange_(exchange) {
    if (size() == 1) return;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int kind = 0; kind < kReadyKinds; ++kind) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&exchange.ready[kind])) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
  // Every CTA of the cluster runs, and its shared memory may be written. A barrier of the CTA as well.
  __device__ __forceinline__ void open() const {
    if (size() > 1) {
      cluster_wait();
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t rank() const {
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
  }
  __device__ __forceinline__ uint32_t size() const {
    uint32_t n;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
    return n;
  }

  // Smallest and largest key of the CTA's threads, in all of them.
  __device__ __forceinline__ Span block_span(uint32_t low, uint32_t high) {
    const uint64_t mine = static_cast<uint64_t>(__reduce_max_sync(kAll, high)) << 32 | __reduce_min_sync(kAll, low);
    const uint64_t part = swap_parts(mine);
    return {__reduce_min_sync(kAll, static_cast<uint32_t>(part)), __reduce_max_sync(kAll, static_cast<uint32_t>(part >> 32))};
  }
  __device__ __forceinline__ uint32_t block_max(uint32_t x) {
    return __reduce_max_sync(kAll, static_cast<uint32_t>(swap_parts(__reduce_max_sync(kAll, x))));
  }
  __device__ __forceinline__ uint32_t block_min(uint32_t x) {
    return __reduce_min_sync(kAll, static_cast<uint32_t>(swap_parts(__reduce_min_sync(kAll, x))));
  }

  // Afterwards slot(kind, r) is what CTA r gave. give() is called behind a barrier of the CTA, by as many threads as there are CTAs.
  template <class Give>
  __device__ __forceinline__ void publish(int kind, Give&& give) {
    __syncthreads();
    if (size() == 1) {
      if (threadIdx.x == 0) exchange_.slots[kind][0] = give();
      __syncthreads();
      return;
    }
    if (threadIdx.x < size()) {
      const Slot mine = give();
      const uint4* x = reinterpret_cast<const uint4*>(&mine);
      send(&exchange_.slots[kind][rank()], &exchange_.ready[kind], threadIdx.x, *x);
    }
    if (threadIdx.x == 0) expect(kind, size() * sizeof(Slot));
    wait(kind);
  }
  // The last exchange of a kernel: CTA 0 alone receives, and true comes back there; the others must not touch the cluster again.
  // mine: of thread 0.
  __device__ __forceinline__ bool deliver(const Slot& mine) {
    if (size() == 1) {
      if (threadIdx.x == 0) exchange_.slots[kLastSlot][0] = mine;
      __syncthreads();
      return true;
    }
    if (threadIdx.x == 0) {
      send(&exchange_.slots[kLastSlot][rank()], &exchange_.ready[kLastSlot], 0, reinterpret_cast<const uint4&>(mine));
      if (rank() == 0) expect(kLastSlot, size() * sizeof(Slot));
    }
    if (rank() != 0) return false;
    wait(kLastSlot);
    return true;
  }
  __device__ __forceinline__ const Slot& slot(int kind, uint32_t r) const { return exchange_.slots[kind][r]; }
  // The slot of CTA `lane`; zeros in the lanes beyond.
  __device__ __forceinline__ Slot lane_slot(int kind) const {
    const uint32_t lane = thread_id() % 32;
    return lane < size() ? exchange_.slots[kind][lane] : Slot{0, 0};
  }

  __device__ __forceinline__ uint64_t* ready(int kind) { return &exchange_.ready[kind]; }
  // By one thread, once per use.
  __device__ __forceinline__ void expect(int kind, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&exchange_.ready[kind])), "r"(bytes)
                 : "memory");
  }
  // By all threads, once per use.
  __device__ __forceinline__ void wait(int kind) {
    const uint32_t parity = state_ >> kind & 1;
    state_ ^= 1u << kind;
    uint32_t done = 0;
    while (!done) {
      asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                   : "=r"(done)
                   : "r"(shared_address(&exchange_.ready[kind])), "r"(parity)
                   : "memory");
    }
  }

 private:
  // The warps' values, one per lane (repeated where there are fewer warps than lanes). Two buffers: one barrier each.
  __device__ __forceinline__ uint64_t swap_parts(uint64_t mine) {
    state_ ^= 1u << kReadyKinds;
    uint64_t* const parts = exchange_.parts[state_ >> kReadyKinds];
    const uint32_t thread = thread_id();
    if (thread % 32 == 0) parts[thread / 32] = mine;
    __syncthreads();
    return parts[thread % kWarps];
  }

  Exchange& exchange_;
  uint32_t state_ = 0;  // parity of each mbarrier, and above them that of parts
};

}  // namespace pyllm::sampling
