// The end of a segment: what the warps of a CTA, the CTAs of a cluster and the workers that share it know of its keys becomes one.
// Every join is o = sum of 2^(m_i - m) o_i and l = sum of 2^(m_i - m) l_i in a fixed order.
//
//   warps -> CTA      through shared memory, a float4 (two rows, two dimensions) to a thread
//   CTAs -> cluster   each CTA has a slice of the outputs, which all CTAs send to its shared memory (st.async: the data are the signal;
//                     a cluster barrier with release costs a fence of the whole GPU)
//   workers           who lacks the beginning of a segment leaves its part in the workspace; who has the beginning, but not the end,
//                     waits for it. Such a part is the first thing that a worker does and the wait is the last, and only workers with
//                     larger numbers, which stand on CTAs with smaller ones, are waited for: they have started, and none of them waits
//                     before it has left its part. Every 16 bytes are two floats and the stamp of the launch, so that no fence and no
//                     flag is needed; the reader clears the stamps, so a replayed graph finds the workspace as the first run found it:
//                     without its stamp.
#pragma once
#include "attention/decode_rows.cuh"
#include "common/ptx_sm90.cuh"

namespace pyllm::attention {

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// The address of a place in shared memory of this CTA in CTA `rank` of the cluster.
__device__ __forceinline__ uint32_t remote(const void* local, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(rank));
  return address;
}
__device__ __forceinline__ void send(uint32_t to, float4 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(__float_as_uint(x.z)), "r"(__float_as_uint(x.w)), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Without release: what was read before is in registers, and a release would be a fence of the whole GPU.
__device__ __forceinline__ void arrive_remote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Two floats and the stamp that says they are there, written and read as one.
struct Packet {
  uint64_t floats, stamp;
};
__device__ __forceinline__ void store_packet(Packet* to, float a, float b, uint64_t stamp) {
  const uint64_t floats = static_cast<uint64_t>(__float_as_uint(b)) << 32 | __float_as_uint(a);
  asm volatile("{\n.reg .b128 x;\nmov.b128 x, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], x;\n}" ::"l"(to), "l"(floats), "l"(stamp)
               : "memory");
}
__device__ __forceinline__ Packet load_packet(const Packet* from) {
  Packet x;
  asm volatile("{\n.reg .b128 x;\nld.relaxed.gpu.global.b128 x, [%2];\nmov.b128 {%0, %1}, x;\n}"
               : "=l"(x.floats), "=l"(x.stamp)
               : "l"(from)
               : "memory");
  return x;
}
__device__ __forceinline__ float low_of(uint64_t x) { return __uint_as_float(static_cast<uint32_t>(x)); }
__device__ __forceinline__ float high_of(uint64_t x) { return __uint_as_float(static_cast<uint32_t>(x >> 32)); }

// Two rows (2j, 2j + 1) of two dimensions: o.x, o.z are of the first; sums: reference exponent and sum of the first, then of the second.
struct Quad {
  float4 sums{-INFINITY, 0.f, -INFINITY, 0.f}, o{0.f, 0.f, 0.f, 0.f};
};

template <int Count>
__device__ __forceinline__ void join(Quad& a, const Quad (&part)[Count]) {
  float top0 = a.sums.x, top1 = a.sums.z;
#pragma unroll
  for (int i = 0; i < Count; ++i) top0 = fmaxf(top0, part[i].sums.x), top1 = fmaxf(top1, part[i].sums.z);
  const float reference0 = top0 == -INFINITY ? 0.f : top0, reference1 = top1 == -INFINITY ? 0.f : top1;
  const float keep0 = exp2_fast(a.sums.x - reference0), keep1 = exp2_fast(a.sums.z - reference1);
  a.sums = {top0, a.sums.y * keep0, top1, a.sums.w * keep1};
  a.o.x *= keep0, a.o.y *= keep1, a.o.z *= keep0, a.o.w *= keep1;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const float weight0 = exp2_fast(part[i].sums.x - reference0), weight1 = exp2_fast(part[i].sums.z - reference1);
    a.sums.y = fmaf(part[i].sums.y, weight0, a.sums.y), a.sums.w = fmaf(part[i].sums.w, weight1, a.sums.w);
    a.o.x = fmaf(part[i].o.x, weight0, a.o.x), a.o.y = fmaf(part[i].o.y, weight1, a.o.y);
    a.o.z = fmaf(part[i].o.z, weight0, a.o.z), a.o.w = fmaf(part[i].o.w, weight1, a.o.w);
  }
}

// What a worker leaves for another one: per worker and row tile two packets a quad, then per CTA those of the sums of its 8 rows.
template <class S>
struct Workspace {
  Packet* packets;
  int line;  // packets of a worker

  __device__ __forceinline__ explicit Workspace(const DecodeAttentionParams& p)
      : packets(static_cast<Packet*>(p.workspace)), line(S::kRowTiles * (2 * S::kQuads + (kRowTile << p.cluster_shift))) {}
  __device__ __forceinline__ Packet* out(int worker, int n, int quad) const {
    return packets + static_cast<int64_t>(worker) * line + 2 * (n * S::kQuads + quad);
  }
  __device__ __forceinline__ Packet* sum(int worker, int rank, int n, int j) const {
    return packets + static_cast<int64_t>(worker) * line + S::kRowTiles * 2 * S::kQuads + (rank * S::kRowTiles + n) * kRowTile + 2 * j;
  }
};

// How a CTA's shared memory is laid out behind the ring.
template <class S>
struct MergeShared {
  float4 exchange[S::kWarps * S::kQuads];
  float4 sums[S::kWarps * 4];
  float4 outs[S::kQuads + 4 * kMaxCluster];  // what the CTAs of the cluster sent of this CTA's slice
  float4 totals[kMaxCluster * 4];
  uint64_t barrier;  // what the others sent is here
  uint64_t free;     // the others have read what this CTA sent
};

// In q's dtype.
template <class S>
__device__ __forceinline__ uint16_t rounded(const DecodeAttentionParams& p, float x) {
  if (is_bf16<S>(p)) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
  return __half_as_ushort(__float2half_rn(x));
}

template <class S>
struct Merger {
  MergeShared<S>& shared;
  int worker, rank;  // and of this CTA in the worker
  int shift;         // log2 of the worker's CTAs
  int parity = 0;
  bool first_exchange = true;

  // All threads, once.
  __device__ __forceinline__ void begin() {
    if (shift == 0) return;
    if (threadIdx.x == 0) {
      barrier_init(smem_address(&shared.barrier), 1);
      barrier_init(smem_address(&shared.free), 1 << shift);
      barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive();
  }

  // A place in the shared memory of the worker's CTA `i`.
  __device__ __forceinline__ uint32_t peer(const void* local, int i) const { return remote(local, cluster_base() + i); }
  __device__ __forceinline__ int cluster_base() const { return static_cast<int>(cluster_rank()) - rank; }

  __device__ __forceinline__ static int slice(int rank, int shift) { return (S::kQuads / 4 * rank >> shift) * 4; }

  // All threads. `pieces` of the workers behind this one belong to the segment; more: another segment follows.
  __device__ __forceinline__ void finish(const DecodeAttentionParams& p, const Cursor& at, const Rows<S>& rows, int pieces, bool more,
                                         int warp, int lane) {
    const Workspace<S> space(p);
#pragma unroll
    for (int n = 0; n < S::kRowTiles; ++n) {
      leave(rows, n, warp, lane);
      __syncthreads();
      if (shift == 0) {
#pragma unroll 1
        for (int g = threadIdx.x; g < S::kQuads; g += S::kThreads) emit(p, space, at, of_warps(g), n, g, 0, pieces, rows.value_scale);
        __syncthreads();
      } else {
        exchange_slices();
        const int first = slice(rank, shift), last = slice(rank + 1, shift);
#pragma unroll 1
        for (int g = first + threadIdx.x; g < last; g += S::kThreads) {
          Quad quad, part[kMaxCluster];
#pragma unroll
          for (int i = 0; i < kMaxCluster; ++i) {
            if (i < 1 << shift) part[i] = {shared.totals[i * 4 + g % 4], shared.outs[i * (last - first) + g - first]};
          }
          join(quad, part);
          emit(p, space, at, quad, n, g, first, pieces, rows.value_scale);
        }
        if (more || n + 1 < S::kRowTiles) {
          __syncthreads();  // all have read the exchange, which a warp without steps in the next segment overwrites at once
          if (threadIdx.x < 1 << shift) arrive_remote(peer(&shared.free, threadIdx.x));
        }
      }
      if (pieces > 0) clear_sums(p, space, n, pieces);
    }
  }

 private:
  __device__ __forceinline__ void leave(const Rows<S>& rows, int n, int warp, int lane) {
    float sum[2], reference[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      sum[e] = rows.sum[n][e];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum[e] += __shfl_xor_sync(kAllLanes, sum[e], offset);
      reference[e] = rows.top[n][e] - S::kLift;
    }
    if (lane < 4) shared.sums[warp * 4 + lane] = {reference[0], sum[0], reference[1], sum[1]};
#pragma unroll
    for (int d = 0; d < S::kBlocks; ++d) {
      shared.exchange[warp * S::kQuads + d * 32 + lane] = {rows.o[n][d][0], rows.o[n][d][1], rows.o[n][d][2], rows.o[n][d][3]};
    }
  }

  __device__ __forceinline__ Quad of_warps(int g) const {
    Quad quad, part[S::kWarps];
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) part[w] = {shared.sums[w * 4 + g % 4], shared.exchange[w * S::kQuads + g]};
    join(quad, part);
    return quad;
  }

  // Sends the CTA's outputs to those who have their slices, and waits for what the others send.
  __device__ __forceinline__ void exchange_slices() {
    if (threadIdx.x == 0) {
      barrier_arrive_expect(smem_address(&shared.barrier), (16 << shift) * (slice(rank + 1, shift) - slice(rank, shift) + 4));
    }
    Quad quad[(S::kQuads + S::kThreads - 1) / S::kThreads];
#pragma unroll
    for (int i = 0; i * S::kThreads < S::kQuads; ++i) {
      const int g = i * S::kThreads + threadIdx.x;
      if (g < S::kQuads) quad[i] = of_warps(g);
    }
    if (first_exchange) {
      cluster_wait();  // the others' barriers are there,
    } else {
      barrier_wait(smem_address(&shared.free), parity ^ 1);  // or they have read what the last exchange brought them
    }
    first_exchange = false;
#pragma unroll
    for (int i = 0; i * S::kThreads < S::kQuads; ++i) {
      const int g = i * S::kThreads + threadIdx.x;
      if (g >= S::kQuads) break;
      const int to = (((g / 4 + 1) << shift) - 1) / (S::kQuads / 4), first = slice(to, shift);
      send(peer(&shared.outs[rank * (slice(to + 1, shift) - first) + g - first], to), quad[i].o, peer(&shared.barrier, to));
      if (g < 4 << shift) send(peer(&shared.totals[rank * 4 + g % 4], g / 4), quad[i].sums, peer(&shared.barrier, g / 4));
    }
    barrier_wait(smem_address(&shared.barrier), parity);
    parity ^= 1;
  }

  __device__ __forceinline__ void emit(const DecodeAttentionParams& p, const Workspace<S>& space, const Cursor& at, Quad quad, int n, int g,
                                       int first, int pieces, float value_scale) const {
    const int j = g % 4;
    const QueryRow two[2] = {query_row(p, at, n * kRowTile + 2 * j), query_row(p, at, n * kRowTile + 2 * j + 1)};
    if (!two[0].exists) return;
    if (at.step != at.s.first) {
      Packet* const outs = space.out(worker, n, g);
      if (g - first < 4) {
        Packet* const sums = space.sum(worker, rank, n, j);
        store_packet(sums, quad.sums.x, quad.sums.y, p.stamp);
        store_packet(sums + 1, quad.sums.z, quad.sums.w, p.stamp);
      }
      store_packet(outs, quad.o.x, quad.o.y, p.stamp);
      store_packet(outs + 1, quad.o.z, quad.o.w, p.stamp);
      return;
    }
    if (pieces > 0) gather(p, space, quad, n, g, pieces);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!two[e].exists) continue;
      const RowEnd end = finish_row(e == 0 ? quad.sums.x : quad.sums.z, e == 0 ? quad.sums.y : quad.sums.w,
                                    p.sinks == nullptr ? nullptr : p.sinks + two[e].head);
      const int64_t line = static_cast<int64_t>(at.s.q_start + two[e].j) * p.heads + two[e].head;
      uint16_t* const to = static_cast<uint16_t*>(p.out) + line * S::kDim;
      const float factor = end.factor * value_scale;
      to[Rows<S>::dimension(g / 32, 0, g % 32)] = rounded<S>(p, (e == 0 ? quad.o.x : quad.o.y) * factor);
      to[Rows<S>::dimension(g / 32, 2, g % 32)] = rounded<S>(p, (e == 0 ? quad.o.z : quad.o.w) * factor);
      if (g < 4) p.lse[line] = end.lse();
    }
  }

  // The parts of the workers behind this one, in their order, as soon as they are there.
  __device__ __forceinline__ void gather(const DecodeAttentionParams& p, const Workspace<S>& space, Quad& quad, int n, int g,
                                         int pieces) const {
    constexpr int kFlight = 4;  // parts at once; 8 would double the registers of the kernel
#pragma unroll 1
    for (int from = 0; from < pieces; from += kFlight) {
      Packet packets[kFlight][4];
      bool here;
      do {
        here = true;
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
          const int other = worker + p.lanes * (1 + min(from + i, pieces - 1));
          const Packet *const sums = space.sum(other, rank, n, g % 4), *const outs = space.out(other, n, g);
          packets[i][0] = load_packet(sums), packets[i][1] = load_packet(sums + 1);
          packets[i][2] = load_packet(outs), packets[i][3] = load_packet(outs + 1);
#pragma unroll
          for (int k = 0; k < 4; ++k) here &= packets[i][k].stamp == p.stamp;
        }
      } while (!here);
      Quad part[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (from + i >= pieces) break;
        const Packet(&x)[4] = packets[i];
        part[i] = {{low_of(x[0].floats), high_of(x[0].floats), low_of(x[1].floats), high_of(x[1].floats)},
                   {low_of(x[2].floats), high_of(x[2].floats), low_of(x[3].floats), high_of(x[3].floats)}};
        Packet* const outs = space.out(worker + p.lanes * (1 + from + i), n, g);
        outs[0].stamp = outs[1].stamp = 0;
      }
      join(quad, part);
    }
  }

  // The sums have many readers: cleared when all have them.
  __device__ __forceinline__ void clear_sums(const DecodeAttentionParams& p, const Workspace<S>& space, int n, int pieces) const {
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < pieces * kRowTile; i += S::kThreads)
      space.sum(worker + p.lanes * (1 + i / kRowTile), rank, n, 0)[i % kRowTile].stamp = 0;
  }
};

}  // namespace pyllm::attention
