// CUDA implementations of route_experts and fused_experts: argument checks, allocation, Params, launch.
#include "common/bind.h"
#include "moe/fused_experts.h"
#include "moe/route_experts.h"

#include <algorithm>
#include <cmath>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;
constexpr auto kBF16 = ScalarType::BFloat16, kFP16 = ScalarType::Half, kFP32 = ScalarType::Float, kE4M3 = ScalarType::Float8_e4m3fn,
               kInt32 = ScalarType::Int, kByte = ScalarType::Byte;
constexpr int64_t kMaxPairs = int64_t{1} << 27;

void check_groups(const Check& check, int64_t experts, int64_t top_k, int64_t groups, int64_t top_groups, bool bias) {
  check.require(groups >= 1 && experts % groups == 0, "groups", "is ", groups, ", expected a divisor of E=", experts);
  check.require(groups <= kMaxGroups, "groups", "is ", groups, ", expected at most ", kMaxGroups, " on CUDA");
  const int64_t size = experts / groups, least = bias && groups > 1 ? 2 : 1;
  check.require(size >= least, "groups", "is ", groups, ", expected ", least, " of the E=", experts,
                " experts or more in each with a bias");
  check.require(top_groups >= 1 && top_groups <= groups, "top_groups", "is ", top_groups, ", expected 1..groups=", groups);
  check.require(top_k <= size * top_groups, "top_groups", "is ", top_groups, ", expected at least top_k=", top_k,
                " experts in the chosen groups, not ", size * top_groups);
}

std::tuple<Tensor, Tensor> route_experts_cuda(const Tensor& logits, int64_t top_k, int64_t scoring, bool renormalize,
                                              const std::optional<Tensor>& bias, double scale, int64_t groups, int64_t top_groups) {
  Check check("route_experts");
  check(logits, "logits").shape({"T", "E"}).dtype({kBF16, kFP16, kFP32}).rows();
  const int64_t tokens = check["T"], experts = check["E"];
  check.require(scoring >= 0 && scoring <= 2, "scoring", "is ", scoring, ", expected 0..2");
  check.require(top_k >= 1 && top_k <= experts, "top_k", "is ", top_k, ", expected 1..E=", experts);
  check.require(experts <= kMaxRouted, "logits", ".size(1) is ", experts, ", expected at most ", kMaxRouted, " on CUDA");
  check.require(top_k <= kMaxTopK, "top_k", "is ", top_k, ", expected at most ", kMaxTopK, " on CUDA");
  check_groups(check, experts, top_k, groups, top_groups, bias.has_value());
  if (bias.has_value()) check(*bias, "bias").shape({"E"}).dtype({kFP32}).contiguous();
  Tensor weights = new_tensor(logits, {tokens, top_k}, kFP32), ids = new_tensor(logits, {tokens, top_k}, kInt32);
  if (tokens > 0) {
    const DeviceScope device(check);
    route_experts({.logits = logits.data_ptr(),
                   .bias = bias.has_value() ? static_cast<const float*>(bias->data_ptr()) : nullptr,
                   .weights = static_cast<float*>(weights.data_ptr()),
                   .ids = static_cast<int*>(ids.data_ptr()),
                   .tokens = tokens,
                   .stride = logits.stride(0),
                   .experts = static_cast<int>(experts),
                   .top_k = static_cast<int>(top_k),
                   .scoring = static_cast<Scoring>(scoring),
                   .renormalize = renormalize,
                   .scale = static_cast<float>(scale),
                   .groups = static_cast<int>(groups),
                   .top_groups = static_cast<int>(top_groups),
                   .dtype = dtype_of(logits)},
                  stream_of(check));
  }
  return {weights, ids};
}

const void* check_rows(Check& check, const OptionalTensor& t, const char* name, const char* columns, ScalarType dtype, bool wanted) {
  check.require(wanted || !t.has_value(), name, "is given, expected None unless w13 is float8_e4m3fn");
  if (!t.has_value()) return nullptr;
  check(*t, name).shape({"E", columns}).dtype({dtype}).contiguous();
  return t->data_ptr();
}

void check_weights(Check& check, const Tensor& x, const Tensor& w13, const Tensor& w2) {
  const bool e4m3 = w13.scalar_type() == kE4M3;
  check(x, "x").shape({"T", "N"}).dtype({kBF16, kFP16}).rows().aligned(16, 2);
  check(w13, "w13").shape({"E", "2F", "N"}).dtype({x.scalar_type(), kE4M3}).contiguous().aligned(16, w13.element_size());
  check(w2, "w2").shape({"E", "N", "F"}).dtype_like(w13, "w13").contiguous().aligned(16, w13.element_size());
  const int64_t granule = e4m3 ? 16 : 8, n = check["N"], f = check["F"], experts = check["E"];
  check.require(check["2F"] == 2 * f, "w13", ".size(1) is ", check["2F"], ", expected ", 2 * f, " (2F, F from w2)");
  check.require(n >= granule && n % granule == 0 && n <= 32768, "x", ".size(1) is ", n, ", expected a multiple of ", granule,
                " up to 32768");
  check.require(f >= granule && f % granule == 0 && f <= 32768, "w2", ".size(2) is ", f, ", expected a multiple of ", granule,
                " up to 32768");
  check.require(experts >= 1 && experts <= kMaxExperts, "w13", ".size(0) is ", experts, ", expected 1 to ", kMaxExperts);
}

// Everything that lives only during the call, each in a tensor of its own.
struct Workspace {
  Tensor tiles, rows, positions, inner, sorted, quantized, scale;

  Workspace(const Tensor& x, ExpertsParams& p) {
    const int64_t pairs = p.tokens * p.top_k, entries = max_tiles(pairs, p.experts, p.tile_rows) + 1;
    tiles = new_tensor(x, {4 * entries}, kInt32);  // the last entry holds the number of tiles
    rows = new_tensor(x, {pairs}, kInt32);
    positions = new_tensor(x, {pairs}, kInt32);
    inner = new_tensor(x, {kGroupedLead + pairs, p.f}, x.scalar_type());
    sorted = new_tensor(x, {kGroupedLead + pairs, p.n}, x.scalar_type());
    p.tiles = static_cast<GroupedTile*>(tiles.data_ptr());
    p.count = static_cast<int*>(tiles.data_ptr()) + 4 * (entries - 1);
    p.rows = static_cast<int*>(rows.data_ptr());
    p.positions = static_cast<int*>(positions.data_ptr());
    p.inner = inner.data_ptr();
    p.sorted = sorted.data_ptr();
    if (p.dtype != DType::kE4M3) return;
    quantized = new_tensor(x, {std::max(p.tokens * p.n, pairs * p.f)}, kByte);
    scale = new_tensor(x, {pairs}, kFP32);
    p.quantized = quantized.data_ptr();
    p.x_scale = static_cast<float*>(scale.data_ptr());
  }
};

Tensor fused_experts_cuda(const Tensor& x, const Tensor& w13, const Tensor& w2, const Tensor& ids, const Tensor& weights, int64_t act,
                          const std::optional<Tensor>& w13_scale, const std::optional<Tensor>& w2_scale,
                          const std::optional<Tensor>& w13_bias, const std::optional<Tensor>& w2_bias, double alpha, double limit) {
  Check check("fused_experts");
  check_weights(check, x, w13, w2);
  const bool e4m3 = w13.scalar_type() == kE4M3;
  check(ids, "ids").shape({"T", "k"}).dtype({kInt32}).contiguous();
  check(weights, "weights").shape({"T", "k"}).dtype({kFP32}).contiguous();
  const int64_t tokens = check["T"], top_k = check["k"], pairs = tokens * top_k;
  check.require(top_k >= 1 && pairs < kMaxPairs, "ids", "has ", tokens, " x ", top_k, " choices, expected top_k >= 1 and fewer than 2^27");
  check.require(act >= 0 && act <= 3, "act", "is ", act, ", expected 0..3");
  check.require(limit >= 0.0 && std::isfinite(limit), "limit", "is ", limit, ", expected finite and >= 0");
  check.require(e4m3 == w13_scale.has_value() && e4m3 == w2_scale.has_value(), "w13_scale",
                e4m3 ? "or w2_scale is missing, expected both with float8_e4m3fn" : "or w2_scale is given, expected None");
  ExpertsParams p{.x = x.data_ptr(), .w13 = w13.data_ptr(), .w2 = w2.data_ptr()};
  p.ids = static_cast<const int*>(ids.data_ptr());
  p.weights = static_cast<const float*>(weights.data_ptr());
  p.tokens = tokens, p.n = check["N"], p.f = check["F"], p.experts = check["E"], p.x_stride = x.stride(0);
  p.top_k = static_cast<int>(top_k), p.act = static_cast<int>(act);
  p.dtype = dtype_of(w13), p.out_dtype = dtype_of(x);
  p.w13_scale = static_cast<const float*>(check_rows(check, w13_scale, "w13_scale", "2F", kFP32, e4m3));
  p.w2_scale = static_cast<const float*>(check_rows(check, w2_scale, "w2_scale", "N", kFP32, e4m3));
  p.w13_bias = check_rows(check, w13_bias, "w13_bias", "2F", x.scalar_type(), true);
  p.w2_bias = check_rows(check, w2_bias, "w2_bias", "N", x.scalar_type(), true);
  p.alpha = static_cast<float>(alpha), p.limit = static_cast<float>(limit);
  Tensor out = new_tensor(x, {tokens, p.n}, x.scalar_type());
  if (tokens == 0) return out;
  p.out = out.data_ptr();
  p.tile_rows = expert_tile_rows(pairs, p.experts);
  const DeviceScope device(check);
  const Workspace workspace(x, p);
  fused_experts(p, stream_of(check));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) {
  m.impl("route_experts", PYLLM_BOX(route_experts_cuda));
  m.impl("fused_experts", PYLLM_BOX(fused_experts_cuda));
}

}  // namespace pyllm
