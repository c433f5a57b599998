// A thread-block cluster that works on one row: barriers, exchanges of one slot per CTA, block reductions, and the total order of tokens.
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
// Address of the same shared-memory variable in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t peer(const void* local, uint32_t rank) {
  uint32_t out;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(local))), "r"(rank));
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

// Order-preserving integer of a float that is not NaN; -0 equals +0.
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

struct Sum {
  template <class V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <class V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};
struct Min {
  template <class V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a < b ? a : b;
  }
};
struct MaxNan {
  __device__ __forceinline__ float operator()(float a, float b) const { return max_nan(a, b); }
};

template <int Width = 32, class V, class Op>
__device__ __forceinline__ V warp_all(V x, Op op) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(kAll, x, offset));
  return x;
}

// What one CTA tells the others at an exchange.
struct alignas(16) Slot {
  uint64_t a, b;
};

// Each kind of exchange has its slots, so that a fast CTA that already publishes the next one never overwrites what a slow one still reads:
// between two exchanges of one kind there is always a cluster barrier.
enum SlotKind { kTopSlot, kFillSlot, kGatherSlot, kCountSlot, kMassSlot, kDrawnSlot, kLastSlot, kSlotKinds };

struct Exchange {
  Slot slots[kSlotKinds][kMaxCluster];
  uint64_t parts[kMaxWarps];
};

template <int kThreads>
class Cluster {
 public:
  static constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= kMaxWarps);

  __device__ explicit Cluster(Exchange& exchange) : exchange_(exchange) {}

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

  // All threads of the CTA get the reduction of all threads' x; the order of the operands is fixed.
  template <class V, class Op>
  __device__ __forceinline__ V block_all(V x, Op op) {
    V* parts = reinterpret_cast<V*>(exchange_.parts);
    x = warp_all(x, op);
    __syncthreads();  // the parts of the last reduction have been read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_all<kWarps>(parts[threadIdx.x % kWarps], op);
  }

  // Barrier of the whole cluster; afterwards slot(kind, r) is what CTA r gave. `mine` must be the same in all threads of warp 0.
  __device__ __forceinline__ void publish(int kind, Slot mine) {
    if (threadIdx.x < size()) give(kind, threadIdx.x, mine);
    cluster_sync();
  }
  // The last exchange of a kernel: CTA 0 alone receives, and true comes back there; the others must not touch the cluster again.
  __device__ __forceinline__ bool deliver(Slot mine) {
    if (threadIdx.x == 0) give(kLastSlot, 0, mine);
    cluster_arrive();
    if (rank() != 0) return false;
    cluster_wait();
    return true;
  }
  __device__ __forceinline__ const Slot& slot(int kind, uint32_t r) const { return exchange_.slots[kind][r]; }

 private:
  __device__ __forceinline__ void give(int kind, uint32_t to, const Slot& mine) {
    store_peer(&exchange_.slots[kind][rank()].a, to, mine.a);
    store_peer(&exchange_.slots[kind][rank()].b, to, mine.b);
  }

  Exchange& exchange_;
};

}  // namespace pyllm::sampling
