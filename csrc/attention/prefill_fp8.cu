#include "attention/prefill_fp8.cuh"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/tensor_map.h"

namespace pyllm {
namespace {

using namespace fp8;

int multiprocessors() {
  int device = 0, count = 0;
  check_launch(cudaGetDevice(&device), "prefill_attention");
  check_launch(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "prefill_attention");
  return count;
}

template <class Tile>
CUtensorMap map_of(const PrefillAttentionParams& p, const char* name, const void* base, bool paged, int64_t token, int64_t head,
                   int64_t page) {
  constexpr Swizzle kSwizzle = Tile::kBox == 128 ? Swizzle::k128 : Swizzle::k64;
  if (p.key_rows == 0) base = p.q;  // an empty tensor has no address; nothing is read
  if (!paged) {
    return make_tensor_map<3>(name, base, DType::kE4M3, {p.dim, p.kv_heads, p.key_rows}, {head, token}, {Tile::kBox, 1, Tile::kKeys},
                              kSwizzle);
  }
  const int rows = 1 << p.page_shift;
  return make_tensor_map<4>(name, base, DType::kE4M3, {p.dim, p.kv_heads, rows, p.key_rows}, {head, token, page},
                            {Tile::kBox, 1, std::min(rows, Tile::kPageRows), 1}, kSwizzle);
}

template <class Tile, bool Paged, bool Capped>
void run(const PrefillAttentionParams& p, cudaStream_t stream) {
  const auto q_map =
      make_tensor_map<3>("prefill_attention q", p.q, DType::kE4M3, {p.dim, p.heads, p.tokens}, {p.q_head_stride, p.q_token_stride},
                         {Tile::kBox, 1, Tile::kRows}, Tile::kBox == 128 ? Swizzle::k128 : Swizzle::k64);
  const auto k_map = map_of<Tile>(p, "prefill_attention k", p.k, Paged, p.k_token_stride, p.k_head_stride, p.k_page_stride);
  const auto v_map = map_of<Tile>(p, "prefill_attention v", p.v, Paged, p.v_token_stride, p.v_head_stride, p.v_page_stride);
  const int64_t most = (p.tokens / Tile::kRows + p.batch + 1) * p.heads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(multiprocessors(), most));
  launch("prefill_attention", {grid, 384, Smem<Tile>::kBytes}, stream, prefill_fp8_kernel<Tile, Paged, Capped>, p, q_map, k_map, v_map);
}

template <class Tile>
void pick(const PrefillAttentionParams& p, cudaStream_t stream) {
  const bool paged = p.page_table != nullptr, capped = p.softcap > 0.f;
  const auto go =
      paged ? (capped ? run<Tile, true, true> : run<Tile, true, false>) : (capped ? run<Tile, false, true> : run<Tile, false, false>);
  go(p, stream);
}

}  // namespace

void prefill_attention_fp8(const PrefillAttentionParams& p, cudaStream_t stream) {
  if (p.tokens == 0) return;
  switch (p.dim) {
    case 128:
      return pick<TileShape<128, 128, 3, 2, 2>>(p, stream);
    case 64:
      return pick<TileShape<64, 128, 4, 3, 3, 64, true>>(p, stream);
    case 256:
      return pick<TileShape<256, 128, 2, 1, 2, 128>>(p, stream);
    default:
      throw std::runtime_error("prefill_attention: q has D=" + std::to_string(p.dim) + ", expected 64, 128 or 256 for float8_e4m3fn");
  }
}

}  // namespace pyllm
