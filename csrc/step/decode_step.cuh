// decode_step: embedding, all layers, final norm and head for M rows, in one launch of one CTA to an SM.
//
// A decode step reads all weights once; what else it does is a chain of latencies: about 25 us of them in a layer of 4096, as long as the
// weights of a small model take. So the weights flow on through rings in shared memory (product.cuh) while values pass between the CTAs
// (exchange.cuh), which stand in for grid barriers: a product begins when its x is there, wherever it was made.
//
//   qkv    = rstd * W_qkv round(x g)                    units of 8 rows, dealt out to all CTAs
//   attended = attention(rope(qkv), cache)              attend.cuh: pieces of the keys, then a join; appends to the cache
//   middle = round(x + W_o attended)
//   gated  = round(act(gate) * up),  rstd * W_up round(middle g)
//   x      = round(middle + W_down gated)
//
// Limits: all CTAs must be resident together (a cooperative launch sees to it). One workspace serves one stream.
#pragma once
#include "step/attend.cuh"

namespace pyllm::step {

// Clears the rows of the exchange that the step before this one used: they are the next step's.
__device__ __forceinline__ void clear_rows(const Args& a, int set, uint32_t rows) {
  uint4* const to = reinterpret_cast<uint4*>(a.sets + set * a.set_bytes);
  const int64_t count = static_cast<int64_t>(rows) * a.p.layers * (a.rows.bytes / 16);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kConsumers + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kConsumers) {
    to[i] = {};
  }
}

// The last CTA turns to the next step. Every CTA has read the header by then.
__device__ __forceinline__ void leave(const Args& a, Header* header, uint32_t step) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (atomicAdd(&header->done, 1) != gridDim.x - 1) return;
  header->done = 0, header->rows = a.p.rows, header->steps = step + 1;
}

// Lines to the L2 that the CTAs together will want soon: what misses it waits behind all the weights that are on their way, some 4 us.
__device__ __forceinline__ void touch(const void* base, int64_t bytes) {
  const uint8_t* const from = static_cast<const uint8_t*>(base);
  const int64_t first = (static_cast<int64_t>(blockIdx.x) + static_cast<int64_t>(gridDim.x) * threadIdx.x) * 128;
  for (int64_t at = first; at < bytes; at += static_cast<int64_t>(gridDim.x) * kConsumers * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
  }
}

// What a layer reads beside its weights.
__device__ __forceinline__ void touch_layer(const Args& a, const StepLayer& w, const uint8_t* rows, int64_t stride) {
  for (int m = 0; m < a.p.rows; ++m) touch(rows + m * stride, a.rows.bytes);
  touch(w.norm[0], a.p.d * 4), touch(w.norm[1], a.p.d * 4);
  touch(a.partials, static_cast<int64_t>(a.p.rows) * a.splits * a.p.heads * (a.p.head_dim + 2) * 8);
  if (w.weight_scale[0] != nullptr) {
#pragma unroll
    for (int i = 0; i < kStepHead; ++i) touch(w.weight_scale[i], a.cut[i].units * kUnit * 4);
  }
}

// What a product of a layer reads and writes; `rows`: the layer's in the exchange.
__device__ __forceinline__ Task task_of(const Args& a, const StepLayer* table, int product, int layer, uint8_t* rows, int64_t stride) {
  const bool head = product == kStepHead, adds = product == kStepO || product == kStepDown;
  const StepLayer& w = table[head ? layer - 1 : layer];
  uint8_t* const before = layer > 0 ? rows - a.rows.bytes + a.rows.stream : nullptr;  // the stream ahead of the layer
  Task t{};
  t.x = {product == kStepQkv || head ? before
                                     : rows + (product == kStepO    ? a.rows.attended
                                               : product == kStepUp ? a.rows.middle
                                                                    : a.rows.gated),
         stride};
  t.residual = {product == kStepO ? before : rows + a.rows.middle, stride};
  t.to = {rows + (product == kStepQkv  ? a.rows.qkv
                  : product == kStepO  ? a.rows.middle
                  : product == kStepUp ? a.rows.gated
                                       : a.rows.stream),
          stride};
  if (head) t.to = {static_cast<uint8_t*>(a.p.logits), static_cast<int64_t>(a.p.vocab) * 2};
  t.adds = adds, t.final = head;
  t.norm = head ? a.p.norm : adds ? nullptr : w.norm[product == kStepUp];
  t.weight_scale = head ? nullptr : w.weight_scale[product];
  t.bias = product == kStepQkv ? static_cast<const __nv_bfloat16*>(w.qkv_bias) : nullptr;
  return t;
}

// All products of the step in order, for a consumer or a finishing warp; attend(layer, qkv, attended) after each qkv. One loop with one
// copy of a product's code: four of them, one after the other, do not fit the instruction cache.
template <bool Fp8, class Role, class Attend>
__device__ __forceinline__ void walk(const Args& a, const StepLayer* table, Role& role, uint8_t* set, int64_t stride, Attend&& attend) {
  uint8_t* rows = set;
  int layer = 0, product = kStepQkv;
#pragma unroll 1
  while (true) {
    const Task t = task_of(a, table, product, layer, rows, stride);
    if (Fp8 && product != kStepHead) {
      role.template run<true>(t, product);
    } else {
      role.template run<false>(t, product);
    }
    if (product == kStepHead) return;
    if (product == kStepQkv) attend(layer, rows + a.rows.qkv, rows + a.rows.attended);
    if (++product == kStepHead) {
      ++layer, rows += a.rows.bytes;
      if (layer < a.p.layers) product = kStepQkv;
    }
  }
}

template <bool Fp8, int D, bool ByteCache>
__global__ void __launch_bounds__(kThreads, 1) decode_step_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = smem_address(shared);
  const int warp = threadIdx.x / 32;
  Header* const header = static_cast<Header*>(a.p.workspace);
  if (threadIdx.x == 0) {
    Barriers{base + a.barriers, a.stages}.init();
    *reinterpret_cast<int*>(shared + a.waiting) = 0;
  }
  // The layers' pointers to shared memory: a miss of the constant cache is one of the L2 too.
  const auto* const table = reinterpret_cast<const StepLayer*>(shared + a.table);
  const uint4* from = reinterpret_cast<const uint4*>(a.p.layer);
  asm volatile("" : "+l"(from));  // as memory: constants of different addresses are read one after the other
  for (int i = threadIdx.x; i < a.p.layers * static_cast<int>(sizeof(StepLayer) / 16); i += kThreads) {
    reinterpret_cast<uint4*>(shared + a.table)[i] = from[i];
  }
  const uint32_t step = *reinterpret_cast<volatile uint32_t*>(&header->steps);
  uint8_t* const set = a.sets + (step & 1) * a.set_bytes;
  const int64_t stride = static_cast<int64_t>(a.p.layers) * a.rows.bytes;
  __syncthreads();

  if (warp >= kWarps) {
    registers_down<88>();  // 128 x 88 + 256 x 208 registers are the 384 x 168 of the launch
    if (warp == kWarps) {
      if (threadIdx.x % 32 == 0) Loader(a, base, table).run();
      __syncwarp();
    } else {
      Finisher finisher(a, base);
      walk<Fp8>(a, table, finisher, set, stride, [](int, uint8_t*, uint8_t*) {});
    }
  } else {
    registers_up<208>();
    clear_rows(a, (step & 1) ^ 1, *reinterpret_cast<volatile uint32_t*>(&header->rows));
    const bool attends = static_cast<int>(blockIdx.x) < a.p.rows * a.p.kv_heads * a.splits;
    touch_layer(a, table[0], set, stride);
    Consumer consumer(a, base);
    Attend<D, ByteCache> attend(a, table, base + a.x);
    walk<Fp8>(a, table, consumer, set, stride, [&](int layer, uint8_t* qkv, uint8_t* attended) {
      if (layer + 1 < a.p.layers) {
        touch_layer(a, table[layer + 1], qkv - a.rows.qkv + a.rows.bytes, stride);
      } else {
        touch(a.p.norm, a.p.d * 4);
      }
      if (!attends) return;
      consumer.tell_waiting(1);
      attend.run(layer, qkv, attended, stride, reinterpret_cast<uint64_t*>(a.partials), step * a.p.layers + layer + 1);
      consumer.tell_waiting(0);
    });
  }
  leave(a, header, step);
}

}  // namespace pyllm::step
