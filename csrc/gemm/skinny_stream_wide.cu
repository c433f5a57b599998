// How skinny_stream_wide cuts a product, and its launch.
#include "gemm/skinny_stream_wide.cuh"

#include <algorithm>

#include "common/dispatch.h"
#include "common/tensor_map.h"
#include "gemm/skinny_linear.h"

namespace pyllm {
namespace {

// One H200, 16 rows, us. K whole and in halves: 8192 x 1024 of bf16 5.8 and 6.0, of e4m3 3.8 and 4.0; 2048 x 2048 of e4m3 3.7 and 3.2;
// 8192 x 3584 of e4m3 8.6 and 9.0, 7168 x 8192 15.0 and 15.3; 6144 x 4096 8.2 and 7.9.
constexpr int kShortRow = 2048, kShortRowE4M3 = 8192;  // bytes of rows of w up to which K is whole,
constexpr int kShortRows = 48;                         // from so many rows of w for each SM on
// Where rows are that short and a CTA has one block, x comes in pieces of 512 bytes: 8192 x 1024 of bf16 5.7 and 5.8, of e4m3 3.8 and 3.9,
// with four rows 3.6 and 3.9. Otherwise 256: 16384 x 2048 of e4m3 9.8 and 10.1, 28672 x 4096 28.9 and 29.6.

// A CTA has all of an SM, or leaves half of it to one of the next kernel: 4096 x 14336 of bf16 28.2 and 30.5, 4096 x 4096 9.7 and 10.1;
// 1280 x 8192 10.0 and 8.7, 2048 x 8192 10.8 and 10.2, 6144 x 4096 of e4m3 8.5 and 7.9.
constexpr int kHalf = 113 * 1024, kLongRow = 16 * 1024;
constexpr int64_t kSmall = 26'000'000, kSmallLong = 34'000'000;  // bytes of weights, the latter of rows from kLongRow on
// Bytes of a CTA's weights asked for ahead of x. 96, 128 and 160 KiB: 4096 x 14336 of e4m3 15.1, 15.0 and 15.0, 6144 x 4096 of bf16 13.7,
// 13.6 and 13.7; where K is whole or a CTA has many rows 28672 x 4096 of e4m3 29.3, 29.0 and 28.9, 16384 x 2048 of bf16 17.9, 17.7
// and 17.4. Half an SM, 48 and 96 KiB (all): 6144 x 4096 of e4m3 8.0 and 8.5.
constexpr int kAheadHalf = 48 * 1024, kAhead = 128 * 1024, kAheadMost = 160 * 1024;
// SMs end up to 4 us apart. A next kernel that is let in at the start takes over the first of them at once: 4096 x 14336 of e4m3 14.95 and
// 14.74, with four rows 14.8 and 14.6; 16384 x 2048 with four rows 9.1 and 8.8. With half an SM each, or more rows, it is in the way:
// 6144 x 4096 8.5 and 9.1, 28672 x 4096 28.9 and 29.1.
constexpr int kEarlyBlocks = 2;

struct WidePlan {
  gemm::WideArgs args;
  int blocks, times, ctas, bytes;
};

int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// False: more rows of w for each CTA than it has registers for.
bool plan_wide(WidePlan& plan, const SkinnyLinearParams& p, int split, int sms) {
  const int64_t row_bytes = p.k * bytes_of(p.dtype);
  const int rows = ceil_div(p.n, std::max(sms / split, 1));
  plan.blocks = ceil_div(rows, gemm::kWideBlock);
  if (plan.blocks > gemm::kWideBlocks) return false;
  gemm::WideArgs& a = plan.args;
  a.log_split = split / 2;
  plan.times = split == 1 && plan.blocks == 1 && row_bytes <= kShortRow ? 2 : 1;
  a.units = ceil_div(row_bytes, plan.times * gemm::kWideUnit);
  a.block_rows = ceil_div(ceil_div(rows, plan.blocks), 8) * 8;
  plan.ctas = ceil_div(p.n, plan.blocks * a.block_rows) * split;
  const int turns = ceil_div(a.units, split * gemm::kWideEngines), stage = a.block_rows * gemm::kWideUnit;
  const int x_rows = p.m <= 8 ? 8 : gemm::kWideRows, x_unit = plan.times * gemm::wide_x_unit(x_rows);
  const int sums = plan.blocks * gemm::wide_sums(x_rows), reach = plan.blocks * plan.times;  // stages of weights for one of x
  const bool half = plan.blocks <= 2 && p.n * row_bytes <= (row_bytes >= kLongRow ? kSmallLong : kSmall);
  const int room = ((half ? kHalf : kStreamShared) - sums - gemm::kWideBarriers) / gemm::kWideEngines;
  // The ring of x reaches as far ahead as that of weights, or one unit further.
  a.w_stages = std::min({(room - x_unit) / stage, gemm::kWideStages, turns * reach});
  while (a.w_stages > 1 && a.w_stages * stage + ceil_div(a.w_stages, reach) * x_unit > room) --a.w_stages;
  a.x_stages = std::min({(room - a.w_stages * stage) / x_unit, ceil_div(a.w_stages, reach) + 1, turns, gemm::kWideStages});
  const bool most = x_rows > 8 && (split == 1 || plan.blocks > 2);
  const int ahead = half ? kAheadHalf : most ? kAheadMost : kAhead;
  a.ahead = std::max(ahead / (gemm::kWideEngines * stage), 1);
  a.early = p.dtype == DType::kE4M3 && !half && plan.blocks <= kEarlyBlocks;
  a.x = gemm::kWideEngines * a.w_stages * stage;
  a.sums = a.x + gemm::kWideEngines * a.x_stages * x_unit;
  a.barriers = a.sums + sums;
  plan.bytes = a.barriers + gemm::kWideBarriers;
  return true;
}

template <class T, class Out, int Rows>
void launch_wide(const SkinnyLinearParams& p, WidePlan& plan, cudaStream_t stream) {
  constexpr int kItems = gemm::kWideSlab / static_cast<int>(sizeof(T));
  gemm::WideArgs& a = plan.args;
  a.out = p.out;
  a.m = static_cast<int>(p.m);
  a.columns = static_cast<int>(p.n);
  a.epilogue = p.epilogue;
  const CUtensorMap w_map =
      make_tensor_map<2>("skinny_linear: weight", p.w, p.dtype, {p.k, p.n}, {p.w_stride}, {kItems, a.block_rows}, Swizzle::k128);
  const CUtensorMap x_map = make_tensor_map<2>("skinny_linear: x", p.x, p.dtype, {p.k, p.m},
                                               {p.m > 1 ? p.x_stride : ceil_div(p.k, 16) * 16}, {kItems, Rows}, Swizzle::k128);
  const LaunchShape shape{static_cast<unsigned>(plan.ctas), gemm::kWideThreads, static_cast<size_t>(plan.bytes), 1 << a.log_split};
  if (plan.times == 2) return launch("skinny_linear", shape, stream, gemm::skinny_wide_kernel<T, Out, Rows, 1, 2>, w_map, x_map, a);
  dispatch<1, 2, 3, 4>("skinny_linear: blocks", plan.blocks, [&](auto blocks) {
    launch("skinny_linear", shape, stream, gemm::skinny_wide_kernel<T, Out, Rows, decltype(blocks)::value, 1>, w_map, x_map, a);
  });
}

template <class T, class Out>
void launch_rows(const SkinnyLinearParams& p, WidePlan& plan, cudaStream_t stream) {
  if (p.m <= 8) return launch_wide<T, Out, 8>(p, plan, stream);
  launch_wide<T, Out, gemm::kWideRows>(p, plan, stream);
}

}  // namespace

bool skinny_stream_wide(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  if (p.m > gemm::kWideRows || p.gated || p.norm_weight != nullptr) return false;
  const int short_row = p.dtype == DType::kE4M3 ? kShortRowE4M3 : kShortRow;
  const bool whole = p.k * bytes_of(p.dtype) <= short_row && p.n >= int64_t{kShortRows} * sms;
  WidePlan plan{};
  if (!plan_wide(plan, p, whole ? 1 : 2, sms) && (whole || !plan_wide(plan, p, 1, sms))) return false;
  if (p.dtype == DType::kBF16) {
    launch_rows<__nv_bfloat16, __nv_bfloat16>(p, plan, stream);
  } else if (p.dtype == DType::kFP16) {
    launch_rows<__half, __half>(p, plan, stream);
  } else if (p.out_dtype == DType::kFP16) {
    launch_rows<__nv_fp8_e4m3, __half>(p, plan, stream);
  } else {
    launch_rows<__nv_fp8_e4m3, __nv_bfloat16>(p, plan, stream);
  }
  return true;
}

}  // namespace pyllm
