// The host side of decode_step: cuts, places, and the launch of one instantiation.
#pragma once
#include <algorithm>

#include "common/launch.h"
#include "common/tensor_map.h"
#include "step/decode_step.cuh"

namespace pyllm::step {

constexpr int kSharedBytes = 227 * 1024;           // of an SM of sm_90, for one CTA
constexpr int kLeastStages = 4, kMostStages = 12;  // of 16 KiB
// On their way at most, and while the CTA waits for values of others: what they wait for queues behind the weights.
constexpr int kFlying = 4, kFlyingWaiting = 2;
constexpr int kMostCtas = 256;  // whose partial results the workspace has room for; rows times KV heads are no more either

constexpr int64_t aligned(int64_t bytes, int64_t to = 256) { return (bytes + to - 1) / to * to; }

inline Rows rows_of(int64_t d, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ffn) {
  Rows r{};
  r.qkv = 0;
  r.attended = static_cast<int>((heads + 2 * kv_heads) * head_dim * 2);
  r.middle = r.attended + static_cast<int>(heads * head_dim * 2);
  r.gated = r.middle + static_cast<int>(d * 2);
  r.stream = r.gated + static_cast<int>(ffn * 2);
  r.bytes = static_cast<int>(aligned(r.stream + d * 2, 16));
  return r;
}

// Offsets in a workspace for steps of up to `rows` rows.
struct Workspace {
  int64_t zeros, partials, sets, set_bytes, bytes;
};
inline Workspace workspace_of(int64_t rows, int64_t layers, int64_t d, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ffn) {
  Workspace w{};
  w.zeros = kHeader;
  w.partials = aligned(w.zeros + d * 2);
  w.sets = aligned(w.partials + kMostCtas * (heads / kv_heads) * (head_dim + 2) * 8);
  w.set_bytes = aligned(rows * layers * rows_of(d, heads, kv_heads, head_dim, ffn).bytes);
  w.bytes = w.sets + 2 * w.set_bytes;
  return w;
}

template <int D, bool ByteCache>
int attend_bytes(int group) {
  return AttendShape<D, ByteCache>::bytes(group);
}

// Products, shared memory and ring; stages is less than kLeastStages where x is too large.
inline void cut(Args& a) {
  StepParams& p = a.p;
  const int width = p.fp8_weights ? 1 : 2, q = p.heads * p.head_dim, group = p.heads / p.kv_heads;
  const int n[kStepProducts] = {q + 2 * p.kv_heads * p.head_dim, p.d, 2 * p.ffn, p.d, p.vocab},
            k[kStepProducts] = {p.d, q, p.d, p.ffn, p.d};
  a.x_bytes = p.head_dim == 64 ? attend_bytes<64, false>(group) : attend_bytes<128, false>(group);
  for (int i = 0; i < kStepProducts; ++i) {
    const int row_bytes = k[i] * (i == kStepHead ? 2 : width), chunks = (row_bytes + kChunk - 1) / kChunk;
    a.cut[i] = {n[i] / kUnit, row_bytes, static_cast<int>(aligned((row_bytes + chunks - 1) / chunks, 512)),
                row_bytes % kLine == 0 ? kLine : kLine / 2, nullptr};
    a.x_bytes = std::max(a.x_bytes, p.rows * pitch_of(k[i] * 2));
  }
  const int sums = kAreas * kWarps * p.rows * kUnit * 4, squares = 4 * kStepRows * kWarps * 4, areas = 2 * kAreas * 8 + 16;
  const int table = p.layers * static_cast<int>(sizeof(StepLayer));
  a.stages = std::min(kMostStages, (kSharedBytes - a.x_bytes - sums - squares - areas - table - 128) / (kStage + 16));
  a.flying = std::min(a.stages, kFlying), a.flying_waiting = kFlyingWaiting;
  a.barriers = a.stages * kStage;
  a.sums = a.barriers + 2 * a.stages * 8 + areas;
  a.waiting = a.sums - 16;
  a.squares = a.sums + sums;
  a.table = a.squares + squares;
  a.x = static_cast<int>(aligned(a.table + table, 128));
}

// The maps of a product: a box is 8 rows of a stage, line by line. Rows and lines have a dimension each and begin anywhere, so that one map
// serves all layers; the last coordinate counts lines from the lowest weight.
inline void make_maps(Args& a, int product) {
  Cut& c = a.cut[product];
  const auto weight = [&](int layer) {
    return static_cast<const uint8_t*>(product == kStepHead ? a.p.head : a.p.layer[layer].weight[product]);
  };
  const uint8_t *lowest = weight(0), *highest = lowest;
  for (int i = 1; i < a.p.layers; ++i) lowest = std::min(lowest, weight(i)), highest = std::max(highest, weight(i));
  if ((highest - lowest) / c.line + static_cast<int64_t>(c.units) * kUnit * (c.row_bytes / c.line) >= int64_t{1} << 31) {
    throw std::runtime_error("decode_step: weights of different layers lie 2^31 lines of " + std::to_string(c.line) +
                             " bytes apart or more");
  }
  c.base = lowest;
  const bool halves = product == kStepUp;  // gate rows, and up rows
  const int tail = c.row_bytes % c.chunk;
  for (int i = 0; i < 2; ++i) {
    const int bytes = i == 0 ? std::min(c.chunk, c.row_bytes) : tail == 0 ? c.line : tail;
    a.map[product][i] = make_tensor_map<4>("decode_step: weight", lowest, DType::kE4M3, {c.line, kUnit, 2, int64_t{1} << 31},
                                           {c.row_bytes, static_cast<int64_t>(halves ? a.p.ffn : kUnit) * c.row_bytes, c.line},
                                           {c.line, halves ? kUnit / 2 : kUnit, halves ? 2 : 1, bytes / c.line},
                                           c.line == kLine ? Swizzle::k128 : Swizzle::kNone);
  }
}

template <bool Fp8, int D, bool ByteCache>
void run_step(Args& a, int ctas, cudaStream_t stream) {
  const auto kernel = decode_step_kernel<Fp8, D, ByteCache>;
  const int bytes = a.x + a.x_bytes;
  check_code(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "decode_step");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_code(cudaLaunchKernelEx(&config, kernel, a), "decode_step");
}

// What does not depend on the instantiation.
inline Args arguments(const StepParams& p, int64_t workspace_bytes, int ctas) {
  Args a{};
  a.p = p;
  cut(a);
  a.inverse_d = 1.f / static_cast<float>(p.d);
  a.splits = std::clamp(ctas / (p.rows * p.kv_heads), 1, kMaxSplits);
  a.rows = rows_of(p.d, p.heads, p.kv_heads, p.head_dim, p.ffn);
  // The rows that the workspace was made for follow from its size: the sets take what the rest leaves.
  const Workspace one = workspace_of(1, p.layers, p.d, p.heads, p.kv_heads, p.head_dim, p.ffn);
  uint8_t* const base = static_cast<uint8_t*>(p.workspace);
  a.zeros = base + one.zeros, a.partials = base + one.partials, a.sets = base + one.sets;
  a.set_bytes = (workspace_bytes - one.sets) / 2 / 256 * 256;
  for (int i = 0; i < kStepProducts; ++i) make_maps(a, i);
  return a;
}

}  // namespace pyllm::step
