// Grouped GEMM, host side: tensor maps and launch of one tile shape.
#pragma once
#include <algorithm>

#include "common/dispatch.h"
#include "common/tensor_map.h"
#include "gemm/grouped_linear.cuh"

namespace pyllm::grouped {

inline int sm_count() {
  static const int count = [] {
    int device = 0, sms = 0;
    check_launch(cudaGetDevice(&device), "grouped GEMM");
    check_launch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "grouped GEMM");
    return sms;
  }();
  return count;
}

template <class C>
Maps make_maps(const GroupedParams& p) {
  const int64_t columns = C::kFirst ? p.n / 2 : p.n;
  Maps maps{};
  if constexpr (C::kFirst) {
    // Groups of 8 rows of the gate and of the up projection in turn.
    maps.w = make_tensor_map<5>("grouped GEMM: weight", p.w, p.dtype, {p.k, 8, 2, columns / 8, p.experts},
                                {p.k, columns * p.k, 8 * p.k, p.n * p.k}, {C::kItems, 8, 2, C::kRowsW / 16, 1}, Swizzle::k128);
  } else {
    maps.w = make_tensor_map<3>("grouped GEMM: weight", p.w, p.dtype, {p.k, p.n, p.experts}, {p.k, p.n * p.k}, {C::kItems, C::kRowsW, 1},
                                Swizzle::k128);
    maps.x = make_tensor_map<2>("grouped GEMM: x", p.x, p.dtype, {p.k, p.m}, {p.x_stride}, {C::kItems, C::BX}, Swizzle::k128);
  }
  // Row c1 + c2 of these is row c1 + c2 - kChunkRows of the results.
  const char* base = static_cast<const char*>(p.out) + (kGroupedLead - C::kChunkRows) * columns * sizeof(typename C::Out);
  maps.y = make_tensor_map<3>("grouped GEMM: out", base, p.out_dtype, {columns, C::kChunkRows, p.m + 1}, {columns, columns},
                              {64, C::kChunkRows, 1}, Swizzle::k128);
  return maps;
}

template <class C>
void launch_tile(const GroupedParams& p, cudaStream_t stream) {
  const int64_t tiles = p.max_tiles * ((p.n + C::kRowsW - 1) / C::kRowsW);
  const int64_t grid = std::min<int64_t>(tiles, sm_count() * C::kCtas);
  const Args args{p.x,
                  p.rows,
                  p.tiles,
                  p.count,
                  p.x_stride * static_cast<int64_t>(sizeof(typename C::T)),
                  static_cast<int>(p.max_tiles),
                  static_cast<int>(p.n),
                  static_cast<int>(p.k),
                  p.act,
                  p.alpha,
                  p.limit,
                  p.x_scale,
                  p.w_scale,
                  p.bias,
                  static_cast<char*>(p.out) + kGroupedLead * (C::kFirst ? p.n / 2 : p.n) * sizeof(typename C::Out)};
  const auto kernel = grouped_kernel<C>;
  if (C::kCtas > 1) {
    // Without the whole carve-out the CTAs would not fit beside each other.
    check_launch(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
                 "grouped GEMM");
  }
  launch("grouped GEMM", {dim3(static_cast<unsigned>(grid)), dim3(C::kThreads), C::kSmem}, stream, kernel, make_maps<C>(p), args);
}

// The shape of the tiles of BX rows of x.
template <class T, class Out, int BX, bool First>
using Pick = std::conditional_t<
    BX == 8, Tile<T, Out, 8, 1, 4, 2, First>,
    std::conditional_t<BX == 16, Tile<T, Out, 16, 2, 2, 2, First>,
                       std::conditional_t<BX <= 64, Tile<T, Out, BX, 2, 2, 1, First>, Tile<T, Out, BX, 2, 1, 1, First>>>>;

template <class T, class Out>
void run_grouped(const GroupedParams& p, cudaStream_t stream) {
  dispatch<8, 16, 32, 64, 128>("grouped GEMM: tile_rows", p.tile_rows, [&](auto rows) {
    constexpr int BX = decltype(rows)::value;
    dispatch_bool(p.gated, [&](auto gated) { launch_tile<Pick<T, Out, BX, decltype(gated)::value>>(p, stream); });
  });
}

}  // namespace pyllm::grouped
