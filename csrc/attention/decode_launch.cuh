// The launch of the decode kernels of one type of cache.
#pragma once
#include "attention/decode_attention.cuh"
#include "common/dispatch.h"

namespace pyllm::attention {

template <class S>
void launch_decode(const DecodeAttentionParams& p, cudaStream_t stream) {
  auto* const kernel = decode_attention_kernel<S>;
  // For two CTAs to an SM, of this call and of the next: the driver would keep shared memory for one.
  check_code(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
             "decode_attention");
  LaunchShape shape{static_cast<unsigned>(p.clusters << p.cluster_shift), S::kThreads, S::kSmem};
  shape.cluster = 1 << p.cluster_shift;
  launch("decode_attention", shape, stream, kernel, p);
}

template <class Cache>
void launch_decode_dims(const DecodeAttentionParams& p, cudaStream_t stream) {
  dispatch<64, 96, 128, 192, 256>("decode_attention: D", p.dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    if constexpr (kDim > kNarrow) {
      launch_decode<DecodeShape<Cache, kDim, 1>>(p, stream);
    } else {
      dispatch<1, 2>("decode_attention: row tiles", p.row_tiles, [&](auto tiles) {
        constexpr int kTiles = decltype(tiles)::value;
        constexpr int kCtas = decode_ctas(kDim, kTiles);
        if (kCtas > 1 && p.ctas == kCtas) return launch_decode<DecodeShape<Cache, kDim, kTiles, kCtas>>(p, stream);
        launch_decode<DecodeShape<Cache, kDim, kTiles>>(p, stream);
      });
    }
  });
}

}  // namespace pyllm::attention
