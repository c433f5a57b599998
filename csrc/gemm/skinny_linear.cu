#include "gemm/skinny_linear.h"

#include <algorithm>

#include "common/dispatch.h"
#include "common/tensor_map.h"
#include "gemm/skinny_linear.cuh"

namespace pyllm {
namespace {

int sm_count() {
  static const int count = [] {
    int device = 0, sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    return sms;
  }();
  return count;
}

CUtensorMap weight_map(const SkinnyLinearParams& p, int items, int block_rows) {
  if (!p.gated)
    return make_tensor_map<2>("skinny_linear: weight", p.w, p.dtype, {p.k, p.n}, {p.w_stride}, {items, block_rows}, Swizzle::k128);
  // Eight rows of the gate, the same eight of the up half, the next eight of the gate ...
  return make_tensor_map<4>("skinny_linear: weight", p.w, p.dtype, {p.k, 8, 2, p.n / 16},
                            {p.w_stride, p.n / 2 * p.w_stride, 8 * p.w_stride}, {items, 8, 2, block_rows / 16}, Swizzle::k128);
}

// Of a CTA's weights not yet asked for when the next kernel is let in: it takes about 2 us to start.
constexpr int kTriggerBytes = 64 * 1024;

template <class T, class Out, int N, int Slabs, bool Gated, bool Norm>
void run(const SkinnyLinearParams& p, cudaStream_t stream) {
  using Shape = gemm::SkinnyShape<N, Slabs, Norm>;
  constexpr int kItems = gemm::kSlabBytes / static_cast<int>(sizeof(T));
  const int units = static_cast<int>(gemm::ceil_div(p.k, kItems * Slabs));
  const gemm::SkinnyPlan plan = gemm::plan_skinny(p.n, units, Gated ? 16 : 8, sm_count());
  gemm::SkinnyArgs args{};
  args.out = p.out;
  args.m = static_cast<int>(p.m);
  args.rows = static_cast<int>(p.n);
  args.columns = Gated ? args.rows / 2 : args.rows;
  args.units = units;
  args.split = plan.split;
  args.block_rows = plan.block_rows;
  args.blocks = plan.blocks;
  args.per_cluster = plan.per_cluster;
  args.w_stages = std::min(Shape::kRing / (plan.block_rows * gemm::kSlabBytes * Slabs), gemm::kMaxStages);
  args.x_stages = Shape::kXStages;
  args.trigger_left = static_cast<int>(gemm::ceil_div(kTriggerBytes, plan.block_rows * gemm::kSlabBytes * Slabs));
  args.norm_weight = p.norm_weight;
  args.norm_fp32 = p.norm_fp32;
  args.eps = p.eps;
  args.k = static_cast<int>(p.k);
  args.epilogue = p.epilogue;
  const CUtensorMap w_map = weight_map(p, kItems, plan.block_rows);
  const CUtensorMap x_map = make_tensor_map<2>("skinny_linear: x", p.x, p.dtype, {p.k, p.m},
                                               {p.m > 1 ? p.x_stride : gemm::ceil_div(p.k, 16) * 16}, {kItems, N}, Swizzle::k128);
  const auto kernel = gemm::skinny_linear_kernel<T, Out, N, Slabs, Gated, Norm>;
  // Without the whole carve-out the next kernel's CTAs would not fit beside these.
  check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
               "skinny_linear");
  launch("skinny_linear", {static_cast<unsigned>(plan.clusters * plan.split), gemm::kSkinnyThreads, Shape::kShared, plan.split}, stream,
         kernel, w_map, x_map, args);
}

constexpr int kSlabs = 2;  // 256 bytes of a row at a time: 128 read at 77 % of the speed

template <class T, class Out, bool Norm>
void run_rows(const SkinnyLinearParams& p, cudaStream_t stream) {
  const int rows = p.m <= 8 ? 8 : p.m <= 16 ? 16 : p.m <= 32 ? 32 : 64;
  dispatch<8, 16, 32, 64>("skinny_linear: rows", rows, [&](auto n) {
    dispatch_bool(p.gated, [&](auto gated) { run<T, Out, decltype(n)::value, kSlabs, decltype(gated)::value, Norm>(p, stream); });
  });
}

}  // namespace

void skinny_linear(const SkinnyLinearParams& p, cudaStream_t stream) {
  if (skinny_stream(p, sm_count(), stream)) return;
  if (p.norm_weight != nullptr) {
    dispatch_dtype<DType::kBF16>("skinny_linear: x with a norm", p.dtype, [&](auto t) {
      using T = typename decltype(t)::type;
      run_rows<T, T, true>(p, stream);
    });
    return;
  }
  dispatch_dtype<DType::kBF16, DType::kFP16>("skinny_linear: out", p.out_dtype, [&](auto out) {
    using Out = typename decltype(out)::type;
    if (p.dtype == DType::kE4M3) return run_rows<__nv_fp8_e4m3, Out, false>(p, stream);
    run_rows<Out, Out, false>(p, stream);
  });
}

}  // namespace pyllm
