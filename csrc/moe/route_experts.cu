#include "moe/route_experts.h"

#include "common/dispatch.h"
#include "moe/route_experts.cuh"

namespace pyllm {

void route_experts(const RouteParams& p, cudaStream_t stream) {
  int per_lane = 1;
  while (32 * per_lane < p.experts) per_lane *= 2;
  const auto blocks = static_cast<unsigned>((p.tokens + moe::kRouteWarps - 1) / moe::kRouteWarps);
  dispatch<1, 2, 4, 8, 16, 32>("route_experts: experts / 32", per_lane, [&](auto v) {
    dispatch_dtype<DType::kBF16, DType::kFP16, DType::kFP32>("route_experts: logits", p.dtype, [&](auto t) {
      const auto kernel = moe::route_kernel<typename decltype(t)::type, decltype(v)::value>;
      launch("route_experts", {dim3(blocks), dim3(32 * moe::kRouteWarps)}, stream, kernel, p);
    });
  });
}

}  // namespace pyllm
