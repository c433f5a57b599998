#include "moe/fused_experts.h"

#include "common/dispatch.h"
#include "gemm/grouped_linear.h"
#include "moe/fused_experts.cuh"
#include "norm/quantize_fp8.h"

namespace pyllm {
namespace {

// Rows of `from` in e4m3, with a scale for each.
void quantize(const ExpertsParams& p, const void* from, int64_t rows, int64_t n, int64_t stride, cudaStream_t stream) {
  quantize_fp8({.x = from,
                .x_stride = stride,
                .out = static_cast<uint8_t*>(p.quantized),
                .scale = nullptr,
                .scale_out = p.x_scale,
                .partials = nullptr,
                .rows = rows,
                .n = static_cast<int>(n),
                .dtype = p.out_dtype,
                .mode = QuantMode::kToken},
               stream);
}

void combine(const ExpertsParams& p, const void* sorted, cudaStream_t stream) {
  const moe::CombineArgs args{sorted, p.positions, p.weights, p.out, p.n, p.top_k};
  const dim3 grid(static_cast<unsigned>(p.tokens), static_cast<unsigned>((p.n / 8 + moe::kCombineThreads - 1) / moe::kCombineThreads));
  dispatch_dtype<DType::kBF16, DType::kFP16>("fused_experts: x", p.out_dtype, [&](auto t) {
    launch("fused_experts: sum", {grid, dim3(moe::kCombineThreads)}, stream, moe::combine_kernel<typename decltype(t)::type>, args);
  });
}

}  // namespace

int expert_tile_rows(int64_t pairs, int64_t experts) {
  // Twice the average: most experts are one tile then, and read their weight once.
  int rows = 8;
  while (rows < 128 && rows * experts < 2 * pairs) rows *= 2;
  return rows;
}

void fused_experts(const ExpertsParams& p, cudaStream_t stream) {
  const int64_t pairs = p.tokens * p.top_k;
  const bool e4m3 = p.dtype == DType::kE4M3;
  sort_experts({.ids = p.ids,
                .pairs = pairs,
                .experts = static_cast<int>(p.experts),
                .top_k = p.top_k,
                .tile_rows = p.tile_rows,
                .rows = p.rows,
                .positions = p.positions,
                .tiles = p.tiles,
                .count = p.count},
               stream);
  if (e4m3) quantize(p, p.x, p.tokens, p.n, p.x_stride, stream);
  GroupedParams g{.x = e4m3 ? p.quantized : p.x,
                  .rows = p.rows,
                  .w = p.w13,
                  .out = p.inner,
                  .tiles = p.tiles,
                  .count = p.count,
                  .max_tiles = max_tiles(pairs, p.experts, p.tile_rows),
                  .tile_rows = p.tile_rows,
                  .m = pairs,
                  .n = 2 * p.f,
                  .k = p.n,
                  .experts = p.experts,
                  .x_stride = e4m3 ? p.n : p.x_stride,
                  .dtype = p.dtype,
                  .out_dtype = p.out_dtype,
                  .gated = true,
                  .act = p.act,
                  .alpha = p.alpha,
                  .limit = p.limit,
                  .x_scale = p.x_scale,
                  .w_scale = p.w13_scale,
                  .bias = p.w13_bias};
  grouped_linear(g, stream);
  const char* inner = static_cast<const char*>(p.inner) + kGroupedLead * p.f * 2;
  if (e4m3) quantize(p, inner, pairs, p.f, p.f, stream);
  g.x = e4m3 ? p.quantized : inner;
  g.rows = nullptr;
  g.w = p.w2;
  g.out = p.sorted;
  g.n = p.n;
  g.k = p.f;
  g.x_stride = p.f;
  g.gated = false;
  g.w_scale = p.w2_scale;
  g.bias = p.w2_bias;
  grouped_linear(g, stream);
  combine(p, static_cast<const char*>(p.sorted) + kGroupedLead * p.n * 2, stream);
}

}  // namespace pyllm
