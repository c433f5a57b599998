// How skinny_stream cuts a product, and its launch: one CTA an SM, rings of 64 KiB stages in all the shared memory that x leaves.
#pragma once
#include <algorithm>

#include "common/dispatch.h"
#include "common/tensor_map.h"
#include "gemm/skinny_linear.h"
#include "gemm/skinny_stream.cuh"

namespace pyllm::gemm {

// Rows of w at a time, and slices of 128 bytes of each in a stage of a warp's ring.
template <int Rows, int Slices>
struct Cut {
  static constexpr int kRows = Rows, kSlices = Slices;
  using Shape = StreamShape<Rows, Slices>;
};
using Usual = Cut<32, 2>;
using Tall = Cut<64, 1>;    // short rows: fewer sums to add
using Long = Cut<16, 4>;    // long rows, where units of 32 leave SMs without work
using Narrow = Cut<16, 2>;  // stages half the size, where x leaves room for one of the others alone
constexpr int kStreamStages = 8;
constexpr int kSumsBytes = 8 * 1024;  // of an area of partial sums

struct StreamPlan {
  int units, ctas, share, batch, stages;  // no stages: x does not fit
  StreamLayout at;
  // Share of the SMs' turns that have work.
  double filled(int sms) const { return static_cast<double>(units) / ((units + sms - 1) / sms * sms); }
};

template <class Cut>
StreamPlan plan_stream(const SkinnyLinearParams& p, int sms) {
  using Shape = typename Cut::Shape;
  StreamPlan plan{};
  const int m = static_cast<int>(p.m), item = static_cast<int>(bytes_of(p.dtype));
  plan.units = static_cast<int>((p.n + Cut::kRows - 1) / Cut::kRows);
  plan.ctas = std::min(plan.units, sms);
  plan.share = stream_share(static_cast<int>(p.k) * item);
  const int most = (plan.units + plan.ctas - 1) / plan.ctas;
  plan.batch = std::clamp(kSumsBytes / Shape::unit_sums(m), 1, most);
  for (plan.stages = kStreamStages; plan.stages > 0; --plan.stages) {
    plan.at = Shape::layout(m, plan.share, plan.stages, plan.batch, most, item == 1);
    if (plan.at.bytes <= kStreamShared) break;
  }
  return plan;
}

template <class T, class Out, int Tiles, class Cut, bool Gated, bool Norm>
void launch_stream(const SkinnyLinearParams& p, const StreamPlan& plan, cudaStream_t stream) {
  constexpr int kItem = sizeof(T), kItems = kSliceBytes / kItem;
  StreamArgs args{};
  args.x = static_cast<const uint8_t*>(p.x);
  args.out = p.out;
  args.x_stride = p.x_stride * kItem;
  args.m = static_cast<int>(p.m);
  args.m_inverse = (1 << 16) / args.m + 1;
  args.columns = static_cast<int>(Gated ? p.n / 2 : p.n);
  args.row_bytes = static_cast<int>(p.k) * kItem;
  args.units = plan.units;
  args.share = plan.share;
  args.stages = plan.stages;
  args.batch = plan.batch;
  args.at = plan.at;
  args.norm_weight = p.norm_weight;
  args.norm_fp32 = p.norm_fp32;
  args.eps = p.eps;
  args.epilogue = p.epilogue;
  CUtensorMap w_map;
  if constexpr (Gated) {
    // Eight rows of the gate, the same eight of the up half, the next eight of the gate ...
    w_map = make_tensor_map<4>("skinny_linear: weight", p.w, p.dtype, {p.k, 8, 2, p.n / 16},
                               {p.w_stride, p.n / 2 * p.w_stride, 8 * p.w_stride}, {kItems, 8, 2, Cut::kRows / 16}, Swizzle::k128);
  } else {
    w_map = make_tensor_map<2>("skinny_linear: weight", p.w, p.dtype, {p.k, p.n}, {p.w_stride}, {kItems, Cut::kRows}, Swizzle::k128);
  }
  launch("skinny_linear", {static_cast<unsigned>(plan.ctas), kStreamThreads, static_cast<size_t>(plan.at.bytes)}, stream,
         skinny_stream_kernel<T, Out, Tiles, Cut::kRows, Cut::kSlices, Gated, Norm>, w_map, args);
}

// One H200, us, one row of e4m3: (8192, 1024) Tall 3.9, Usual 4.3; (1280, 8192) Long 4.5, Usual 5.1; four rows of bf16: (6144, 4096) Long
// 13.0, Usual 13.7; eight of (1280, 8192) Narrow 10.0, Usual 12.3; 16 of (6144, 4096) Narrow 15.0, Usual 17.5. The bits are the same.
// All: whether all four are built. Nine to sixteen rows (Tiles = 2) are served where 16 are: the bits do not depend on their number.
template <class T, class Out, int Tiles, bool All, bool Gated, bool Norm>
bool run_stream(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  const int64_t row_bytes = p.k * bytes_of(p.dtype);
  if constexpr (Tiles == 2) {
    SkinnyLinearParams most = p;
    most.m = kStreamRows;
    if (plan_stream<Narrow>(most, sms).stages < 2) return false;
  }
  const StreamPlan usual = plan_stream<Usual>(p, sms);
  if constexpr (All) {
    if (usual.stages < 2 || (Tiles == 2 && row_bytes >= 8192)) {
      const StreamPlan narrow = plan_stream<Narrow>(p, sms);
      if (narrow.stages == 0) return false;
      launch_stream<T, Out, Tiles, Narrow, Gated, Norm>(p, narrow, stream);
      return true;
    }
    if (const StreamPlan tall = plan_stream<Tall>(p, sms); row_bytes <= 2048 && tall.units * 10 >= sms * 9 && tall.stages >= 3 - Tiles) {
      launch_stream<T, Out, Tiles, Tall, Gated, Norm>(p, tall, stream);
      return true;
    }
    if constexpr (Tiles == 1) {
      const StreamPlan long_rows = plan_stream<Long>(p, sms);
      if (row_bytes >= 8192 && usual.filled(sms) < 0.9 * long_rows.filled(sms) && long_rows.stages >= 2) {
        launch_stream<T, Out, Tiles, Long, Gated, Norm>(p, long_rows, stream);
        return true;
      }
    }
  }
  if (usual.stages == 0) return false;
  launch_stream<T, Out, Tiles, Usual, Gated, Norm>(p, usual, stream);
  return true;
}

}  // namespace pyllm::gemm
