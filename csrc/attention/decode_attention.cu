#include "attention/decode_attention.cuh"

#include <algorithm>

#include "attention/decode_combine.cuh"
#include "common/dispatch.h"

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

template <class Q, class Cache, int Dim, int RowTiles>
void launch_decode(const DecodeAttentionParams& p, cudaStream_t stream) {
  using S = attention::DecodeShape<Q, Cache, Dim, RowTiles>;
  launch("decode_attention", {static_cast<unsigned>(p.workers), attention::kWarps * 32, S::kSmem}, stream,
         attention::decode_attention_kernel<Q, Cache, Dim, RowTiles>, p);
  const int rows = std::min(RowTiles * attention::kRowTile, p.group * p.max_q);
  launch("decode_attention",
         {dim3(static_cast<unsigned>(std::max(p.workers - 1, 1)), static_cast<unsigned>(rows)), attention::kCombineWarps * 32}, stream,
         attention::decode_combine_kernel<Q, Dim>, p);
}

template <class Q, class Cache>
void launch_dims(const DecodeAttentionParams& p, cudaStream_t stream) {
  dispatch<64, 128, 256>("decode_attention: D", p.dim, [&](auto dim) {
    constexpr int kDim = decltype(dim)::value;
    if constexpr (kDim == 256) {
      launch_decode<Q, Cache, kDim, 1>(p, stream);
    } else {
      dispatch<1, 2>("decode_attention: row tiles", p.row_tiles,
                     [&](auto tiles) { launch_decode<Q, Cache, kDim, decltype(tiles)::value>(p, stream); });
    }
  });
}

}  // namespace

void plan_decode_attention(DecodeAttentionParams& p, int64_t max_keys) {
  const int rows = p.group * p.max_q;
  p.row_tiles = rows > attention::kRowTile && p.dim < 256 ? 2 : 1;  // at D = 256 two tiles of outputs do not fit the registers
  p.chunks = (rows + p.row_tiles * attention::kRowTile - 1) / (p.row_tiles * attention::kRowTile);
  const int64_t tiles = (max_keys + attention::kTileKeys - 1) / attention::kTileKeys * p.batch * p.kv_heads * p.chunks;
  p.workers = static_cast<int>(std::clamp<int64_t>(tiles, 1, sm_count() * attention::decode_ctas(p.dim)));
}

void decode_attention(const DecodeAttentionParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("decode_attention: q", p.dtype, [&](auto t) {
    using Q = typename decltype(t)::type;
    p.fp8_cache ? launch_dims<Q, __nv_fp8_e4m3>(p, stream) : launch_dims<Q, Q>(p, stream);
  });
}

}  // namespace pyllm
