// The launch of the decode kernels of one type of cache.
#pragma once
#include <limits>

#include "attention/decode_attention.cuh"
#include "attention/decode_one.cuh"
#include "attention/decode_stream.cuh"
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

// A cache for TMA: boxes of `rows` keys of one head in a page. Page numbers are the caller's, so their count is no limit here.
template <class S>
CUtensorMap map_of(const DecodeAttentionParams& p, const void* cache, int64_t page_stride, int rows) {
  const int64_t page = int64_t{1} << p.page_shift;
  return make_tensor_map<4>("decode_attention", cache, S::kWide ? DType::kE4M3 : p.dtype, {S::kDim, p.kv_heads, page, int64_t{1} << 31},
                            {S::kDim, int64_t{p.kv_heads} * S::kDim, page_stride},
                            {S::kDim / S::kParts, 1, static_cast<int>(std::min<int64_t>(page, rows)), 1},
                            S::kBoxBytes == 64 ? Swizzle::k64 : Swizzle::k128);
}

template <class S>
void launch_stream(const DecodeAttentionParams& p, cudaStream_t stream) {
  const auto maps = [&](const void* cache, int64_t stride, int rows) { return map_of<S>(p, cache, stride, rows); };
  const StreamMaps all{{maps(p.k_cache, p.k_page_stride, S::kStepKeys), maps(p.v_cache, p.v_page_stride, S::kStepKeys),
                        maps(p.k_cache, p.k_page_stride, S::kTailKeys), maps(p.v_cache, p.v_page_stride, S::kTailKeys)}};
  launch("decode_attention", {static_cast<unsigned>(p.clusters), S::kThreads, S::kSmem}, stream, decode_stream_kernel<S>, p, all);
}

// Clusters on half of the SMs, one to each part of the GPU, read a 16-bit cache as fast as the memory gives it (one sequence of 16k keys:
// 4.4 TB/s): to cut segments then only adds a join (21.5 instead of 20.3 us).
inline bool stays_whole(const DecodeAttentionParams& p) {
  constexpr int kBusy = 64;  // SMs
  return p.cache == DecodeCache::kLikeQ && p.whole_below >= 0 && p.whole_workers << p.cluster_shift >= kBusy;
}

// One sequence whose query rows fit a tile, in clusters.
inline bool takes_one(const DecodeAttentionParams& p) {
  const bool aligned = (reinterpret_cast<uintptr_t>(p.q) | p.q_token_stride * 2 | p.q_head_stride * 2) % 16 == 0;
  const bool clusters = p.cut_shift > 0 || stays_whole(p);
  return p.batch == 1 && p.group * p.max_q <= kRowTile && clusters && fits_table(p) && aligned && !p.invariant && !p.beside;
}

template <class S>
void launch_one(const DecodeAttentionParams& p, cudaStream_t stream) {
  DecodeAttentionParams own = p;
  if (stays_whole(p)) own.whole_below = std::numeric_limits<int>::max();
  LaunchShape shape{static_cast<unsigned>(p.clusters << p.cluster_shift), S::kThreads, S::kRing + S::kMerge};
  shape.cluster = 1 << p.cluster_shift;
  launch("decode_attention", shape, stream, decode_one_kernel<S>, own);
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
        if constexpr (kCtas > 1) {
          if (takes_one(p)) return launch_one<OneShape<Cache, kDim>>(p, stream);
          if (p.stream) return launch_stream<StreamShape<Cache, kDim>>(p, stream);
          if (p.ctas == kCtas) return launch_decode<DecodeShape<Cache, kDim, kTiles, kCtas>>(p, stream);
        }
        launch_decode<DecodeShape<Cache, kDim, kTiles>>(p, stream);
      });
    }
  });
}

}  // namespace pyllm::attention
