#include "attention/simple_attention.h"

#include <algorithm>

#include "attention/simple_attention.cuh"
#include "common/dispatch.h"
#include "common/launch.h"

namespace pyllm {
namespace {

int sm_count() {
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return sms;
}

template <class T, bool Fp8, int Dim, bool Few>
void launch_simple(const SimpleAttentionParams& p, const SimpleAttentionPlan& plan, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.tiles), static_cast<unsigned>(p.kv_heads), static_cast<unsigned>(p.splits));
  launch("simple_attention", {grid, attention::kSimpleThreads, attention::SimpleShape<T, Dim, Dim, Few>::kSmem}, stream,
         attention::simple_attention_kernel<T, Fp8, Dim, Few>, p);
}

}  // namespace

SimpleAttentionPlan plan_simple_attention(const SimpleAttentionParams& p, int64_t max_q, int64_t max_keys) {
  const bool few = (max_q > 0 ? max_q : p.tokens) * p.group <= 16;
  const int64_t rows = few ? 16 : 64;
  // Every sequence may leave one tile unfilled, and so may the rows past the last one.
  const int64_t tiles = p.tokens * p.group / rows + std::min<int64_t>(p.batch, p.tokens) + 1;
  int64_t splits = 1;
  if (few) {  // up to three CTAs per SM, of 64 keys at least
    splits = std::clamp<int64_t>((3 * sm_count() + tiles * p.kv_heads - 1) / (tiles * p.kv_heads), 1, 64);
    splits = std::min(splits, std::max<int64_t>(1, (max_keys + 63) / 64));
  }
  return {few, static_cast<int>(tiles), static_cast<int>(splits)};
}

void simple_attention(const SimpleAttentionParams& p, const SimpleAttentionPlan& plan, int dim, DType dtype, bool fp8,
                      cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("simple_attention: q", dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    dispatch<64, 96, 128, 256>("simple_attention: D", dim, [&](auto d) {
      constexpr int kDim = decltype(d)::value;
      dispatch_bool(fp8, [&](auto fp8_keys) {
        constexpr bool kFp8 = decltype(fp8_keys)::value;
        plan.few ? launch_simple<T, kFp8, kDim, true>(p, plan, stream) : launch_simple<T, kFp8, kDim, false>(p, plan, stream);
      });
      if (p.splits > 1) {
        launch("simple_attention", {static_cast<unsigned>(p.tokens * p.heads), attention::kSimpleThreads / 4}, stream,
               attention::simple_combine_kernel<T, kDim>, p);
      }
    });
  });
}

}  // namespace pyllm
