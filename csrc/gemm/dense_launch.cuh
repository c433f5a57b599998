// Dense GEMM, host side: tensor maps and launch of one tile shape, choice among those that a unit instantiates.
#pragma once
#include "common/dispatch.h"
#include "common/tensor_map.h"
#include "gemm/dense_few.cuh"
#include "gemm/dense_linear.cuh"
#include "gemm/dense_linear.h"
#include "gemm/dense_plan.h"

namespace pyllm::dense {

inline int sm_count() {
  static const int count = [] {
    int device = 0, sms = 0;
    check_launch(cudaGetDevice(&device), "dense GEMM");
    check_launch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "dense GEMM");
    return sms;
  }();
  return count;
}

template <class C>
constexpr TileInfo tile_info() {
  return {C::kWay == Way::kTurns, C::BM, C::BN, C::kSplit};
}

template <class T>
constexpr DType dtype_of_operand() {
  return sizeof(T) == 1 ? DType::kE4M3 : std::is_same_v<T, __nv_bfloat16> ? DType::kBF16 : DType::kFP16;
}

template <class C>
CUtensorMap make_map_of_result(const DenseParams& p, int64_t columns) {
  return make_tensor_map<2>("out", p.out, p.out_dtype, {columns, p.m}, {columns}, {C::kChunkOut, 64},
                            C::kChunkRow == 128  ? Swizzle::k128
                            : C::kChunkRow == 64 ? Swizzle::k64
                            : C::kChunkRow == 32 ? Swizzle::k32
                                                 : Swizzle::kNone);
}

template <class C>
Maps make_maps(const DenseParams& p) {
  constexpr DType in = dtype_of_operand<typename C::T>();
  const int64_t columns = C::Finish::kGated ? p.n / 2 : p.n;
  Maps maps;
  // One row has no stride; TMA wants one of 16 bytes all the same.
  const int64_t x_stride = p.m > 1 ? p.x_stride : ceil_div(p.k, 16) * 16, w_stride = p.n > 1 ? p.w_stride : ceil_div(p.k, 16) * 16;
  const int rows = C::BM == 64 ? static_cast<int>(std::min<int64_t>(64, ceil_div(p.m, 8) * 8)) : C::BM;
  maps.x = make_tensor_map<2>("x", p.x, in, {p.k, p.m}, {x_stride}, {C::BK, rows}, Swizzle::k128);
  if constexpr (C::Finish::kGated) {
    // Groups of 8 rows of the gate and of the up projection in turn.
    maps.w = make_tensor_map<4>("weight", p.w, in, {p.k, 8, 2, columns / 8}, {w_stride, columns * w_stride, 8 * w_stride},
                                {C::BK, 8, 2, C::BN / 16}, Swizzle::k128);
  } else {
    maps.w = make_tensor_map<2>("weight", p.w, in, {p.k, p.n}, {w_stride}, {C::BK, C::BN}, Swizzle::k128);
  }
  maps.y = make_map_of_result<C>(p, columns);
  return maps;
}

template <class C>
void launch_tile(const DenseParams& p, cudaStream_t stream) {
  const TileInfo info = tile_info<C>();
  const Problem problem{p.m, p.n, p.k, sizeof(typename C::T), sm_count()};
  const int64_t ctas = tiles(info, problem) * C::kSplit;
  // The CTAs of a split meet at cluster barriers once: one tile each.
  const int64_t grid = C::kSplit > 1 ? ctas : std::min(ctas, slots(info, problem.sms));
  const LaunchShape shape{dim3(static_cast<unsigned>(grid)), dim3(C::kThreads), C::kSmem, C::kSplit};
  const Shape sizes{static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k), raster(info)};
  const Blocks blocks{p.x_blocks, p.w_blocks, p.x_blocks_stride, p.w_blocks_stride};
  launch("dense GEMM", shape, stream, gemm_kernel<C>, make_maps<C>(p), sizes, p.epilogue, blocks);
}

// Up to 64 rows of x.
template <class C>
void launch_few(const DenseParams& p, cudaStream_t stream) {
  using T = typename C::T;
  constexpr DType in = dtype_of_operand<T>();
  const TileInfo info = tile_info<C>();
  const Problem problem{p.m, p.n, p.k, sizeof(T), sm_count()};
  const int64_t ctas = ceil_div(p.n, C::BN) * C::kSplit, grid = C::kSplit > 1 ? ctas : std::min(ctas, slots(info, problem.sms));
  const int64_t x_stride = p.m > 1 ? p.x_stride : ceil_div(p.k, 16) * 16, w_stride = p.n > 1 ? p.w_stride : ceil_div(p.k, 16) * 16;
  Maps maps;
  maps.x = make_tensor_map<2>("x", p.x, in, {p.k, p.m}, {x_stride}, {C::Base::BK, static_cast<int>(ceil_div(p.m, 8) * 8)}, Swizzle::k128);
  maps.w = make_tensor_map<2>("weight", p.w, in, {p.k, p.n}, {w_stride}, {C::Base::BK, C::BN}, Swizzle::k128);
  maps.y = make_map_of_result<C>(p, p.n);
  const Shape sizes{static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k), 1};
  const LaunchShape shape{dim3(static_cast<unsigned>(grid)), dim3(C::kThreads), C::kSmem, C::kSplit};
  launch("dense GEMM", shape, stream, few_kernel<C>, maps, sizes, p.epilogue, static_cast<typename C::Out*>(p.out));
}

// A list of tile shapes; `run` takes the one chosen for p.
template <class... C>
struct Tiles {
  static constexpr TileInfo kInfo[] = {tile_info<C>()...};
  static void run(const DenseParams& p, int bytes, cudaStream_t stream) {
    const int chosen = choose_tile(kInfo, sizeof...(C), Problem{p.m, p.n, p.k, bytes, sm_count()});
    int i = 0;
    ((chosen == i++ ? launch_tile<C>(p, stream) : void()), ...);
  }
};

// The same of tiles for up to kFewRows rows of x, without an activation, gate, soft cap or residual.
template <class... C>
struct FewTileList {
  static constexpr TileInfo kInfo[] = {tile_info<C>()...};
  static void run(const DenseParams& p, int bytes, cudaStream_t stream) {
    const int chosen = choose_few(kInfo, sizeof...(C), Problem{p.m, p.n, p.k, bytes, sm_count()});
    int i = 0;
    ((chosen == i++ ? launch_few<C>(p, stream) : void()), ...);
  }
};
template <class T, class Out, class... More>
using FewRowsTiles = FewTileList<FewTile<T, Out, 64, 1>, FewTile<T, Out, 64, 2>, FewTile<T, Out, 64, 4>, FewTile<T, Out, 96, 2>,
                                 FewTile<T, Out, 128, 1>, FewTile<T, Out, 128, 2>, FewTile<T, Out, 224, 1>, More...>;

// Tiles of operands T and results Out without an activation, gate, soft cap or residual.
template <class T, class Out>
using PlainTiles =
    Tiles<Tile<T, Out, Way::kTurns, 128, 128>, Tile<T, Out, Way::kTurns, 128, 160>, Tile<T, Out, Way::kTogether, 128, 32>,
          Tile<T, Out, Way::kTogether, 128, 48>, Tile<T, Out, Way::kTogether, 128, 64>, Tile<T, Out, Way::kTogether, 128, 96>,
          Tile<T, Out, Way::kTogether, 128, 112>, Tile<T, Out, Way::kTogether, 128, 128>, Tile<T, Out, Way::kTogether, 128, 192>,
          Tile<T, Out, Way::kTogether, 128, 224>, Tile<T, Out, Way::kTogether, 128, 256>, Tile<T, Out, Way::kTogether, 128, 64, 2>,
          Tile<T, Out, Way::kTogether, 128, 96, 2>, Tile<T, Out, Way::kTogether, 128, 128, 2>, Tile<T, Out, Way::kTogether, 128, 160, 2>,
          Tile<T, Out, Way::kTogether, 128, 128, 4>>;

// Fewer of them, for types that are rare.
template <class T, class Out>
using FewTiles = Tiles<Tile<T, Out, Way::kTurns, 128, 128>, Tile<T, Out, Way::kTogether, 128, 32>, Tile<T, Out, Way::kTogether, 128, 64>,
                       Tile<T, Out, Way::kTogether, 128, 96>, Tile<T, Out, Way::kTogether, 128, 128>,
                       Tile<T, Out, Way::kTogether, 128, 256>, Tile<T, Out, Way::kTogether, 128, 128, 2>>;

// Few shapes, since each activation is a kernel of its own. Of gated products a wider one too: 128 x 128 asks the L2 for all it delivers,
// and behind a large norm, whose end hands the SMs over in another order, it took 1,690 us where it takes 1,530 alone (4096 rows of 28672 x
// 4096 in bf16; 128 x 160: 1,490 and 1,450).
template <class T, class Out, class Finish>
using FullTiles = std::conditional_t<Finish::kGated,
                                     Tiles<Tile<T, Out, Way::kTurns, 128, 128, 1, Finish>, Tile<T, Out, Way::kTurns, 128, 160, 1, Finish>>,
                                     Tiles<Tile<T, Out, Way::kTurns, 128, 128, 1, Finish>>>;

inline bool is_plain(const DenseParams& p) {
  const gemm::EpilogueParams& e = p.epilogue;
  return !p.gated && e.act == gemm::kNoActivation && e.softcap == 0.f && e.residual == nullptr && e.x_squares == nullptr;
}

template <class T, class Out>
void run_full(const DenseParams& p, cudaStream_t stream) {
  const auto run = [&](auto act) {
    constexpr int kAct = decltype(act)::value;
    if (p.gated) {
      FullTiles<T, Out, Full<kAct, true>>::run(p, sizeof(T), stream);
    } else {
      FullTiles<T, Out, Full<kAct, false>>::run(p, sizeof(T), stream);
    }
  };
  dispatch<gemm::kNoActivation, fused::kSilu, fused::kGelu, fused::kGeluTanh, fused::kRelu2>("act", p.epilogue.act, run);
}

template <class T, class Out>
void run_dense(const DenseParams& p, cudaStream_t stream) {
  if (is_plain(p)) {
    PlainTiles<T, Out>::run(p, sizeof(T), stream);
  } else {
    run_full<T, Out>(p, stream);
  }
}

}  // namespace pyllm::dense
