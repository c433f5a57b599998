#include "gemm/skinny_stream.cuh"

#include <algorithm>

#include "common/dispatch.h"
#include "gemm/skinny_linear.h"

namespace pyllm {
namespace {

// How the rows of w are taken: groups of eight rows at a time, bytes of a row in a stage of a warp's ring, two stages.
template <int Groups, int Chunk>
struct Cut {
  static constexpr int kGroups = Groups, kChunk = Chunk, kStages = 2;
  using Shape = gemm::StreamShape<kGroups, kChunk, kStages>;
};
using Wide = Cut<1, 512>;
using Usual = Cut<2, 256>;

struct Grid {
  int shared, units, slots;  // bytes of a CTA; turns of the whole weight; CTAs that the GPU holds at a time
  // Share of the slots' turns that have work.
  double filled() const { return static_cast<double>(units) / ((units + slots - 1) / slots * slots); }
};

template <class Cut>
Grid grid_of(const SkinnyLinearParams& p, int sms) {
  Grid grid{};
  grid.shared = Cut::Shape::shared_bytes(static_cast<int>(p.m), gemm::stream_share(static_cast<int>(p.k * 2)));
  grid.units = static_cast<int>((p.n + 8 * Cut::kGroups - 1) / (8 * Cut::kGroups));
  grid.slots = sms * (grid.shared <= kStreamHalf ? 2 : 1);
  return grid;
}

// Eight rows at a time where K is long and sixteen leave more slots without work (6144 x 4096: 13.3 instead of 15.7 us) or leave an SM
// with one CTA (4 rows, 4096 x 4096: 10.1 instead of 11.6 us). The bits are the same.
bool takes_wide(const SkinnyLinearParams& p, int sms) {
  const Grid wide = grid_of<Wide>(p, sms), usual = grid_of<Usual>(p, sms);
  if (p.k < 4096) return false;
  return wide.slots > usual.slots || (wide.slots == usual.slots && usual.filled() < 0.9 * wide.filled());
}

template <class T, class Cut, bool Gated, bool Norm>
void run(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  const Grid grid = grid_of<Cut>(p, sms);
  gemm::StreamArgs args{};
  args.w = static_cast<const uint8_t*>(p.w);
  args.x = static_cast<const uint8_t*>(p.x);
  args.out = p.out;
  args.w_stride = p.w_stride * 2;
  args.x_stride = p.x_stride * 2;
  args.m = static_cast<int>(p.m);
  args.rows = static_cast<int>(p.n);
  args.columns = Gated ? args.rows / 2 : args.rows;
  args.row_bytes = static_cast<int>(p.k * 2);
  args.norm_weight = p.norm_weight;
  args.norm_fp32 = p.norm_fp32;
  args.eps = p.eps;
  args.epilogue = p.epilogue;
  const auto kernel = gemm::skinny_stream_kernel<T, Cut::kGroups, Cut::kChunk, Cut::kStages, Gated, Norm>;
  check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
               "skinny_linear");
  launch("skinny_linear", {static_cast<unsigned>(std::min(grid.units, grid.slots)), gemm::kStreamThreads, static_cast<size_t>(grid.shared)},
         stream, kernel, args, grid.units);
}

template <class T, bool Norm>
void run_cut(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  dispatch_bool(p.gated, [&](auto gated) {
    constexpr bool kGated = decltype(gated)::value;
    takes_wide(p, sms) ? run<T, Wide, kGated, Norm>(p, sms, stream) : run<T, Usual, kGated, Norm>(p, sms, stream);
  });
}

}  // namespace

bool skinny_stream(const SkinnyLinearParams& p, int sms, cudaStream_t stream) {
  if (p.m > gemm::kStreamRows || p.dtype == DType::kE4M3 || p.k >= kStreamLongest) return false;
  if (grid_of<Usual>(p, sms).shared > kStreamWhole) return false;
  if (p.norm_weight != nullptr) {
    run_cut<__nv_bfloat16, true>(p, sms, stream);
    return true;
  }
  dispatch_dtype<DType::kBF16, DType::kFP16>("skinny_linear: out", p.out_dtype,
                                             [&](auto t) { run_cut<typename decltype(t)::type, false>(p, sms, stream); });
  return true;
}

}  // namespace pyllm
