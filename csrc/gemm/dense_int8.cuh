// Dense GEMM of int8: products and sums are exact in int32 (|sum| <= 2^14 K < 2^31 for K < 2^17), scaled in fp32 by the epilogue.
#pragma once
#include "gemm/dense_launch.cuh"

namespace pyllm::dense {

template <class Out>
using Int8Tiles = FewTiles<int8_t, Out>;

}  // namespace pyllm::dense
