// Dense GEMM of int8: products and sums are exact in int32 (|sum| <= 2^14 K < 2^31 for K < 2^17), scaled in fp32 by the epilogue.
#pragma once
#include "gemm/dense_launch.cuh"

namespace pyllm::dense {

template <class Out>
using Int8Tiles = Tiles<Tile<int8_t, Out, Way::kTurns, 128, 128, 1, 2, 1>, Tile<int8_t, Out, Way::kTurns, 128, 128, 1, 1, 1>,
                        Tile<int8_t, Out, Way::kTurns, 128, 192, 2, 1, 1>, Tile<int8_t, Out, Way::kTogether, 128, 256, 1, 1, 1>,
                        Tile<int8_t, Out, Way::kTogether, 128, 128, 1, 1, 1>, Tile<int8_t, Out, Way::kTogether, 128, 64, 1, 1, 1>,
                        Tile<int8_t, Out, Way::kTogether, 128, 192, 1, 1, 2>, Tile<int8_t, Out, Way::kTogether, 128, 128, 1, 1, 4>>;

}  // namespace pyllm::dense
