#include "gemm/dense_fp8.h"
#include "gemm/dense_launch.cuh"

namespace pyllm {
namespace {

template <class Out, int BM, int BN, int Split = 1>
using BlockTile = dense::Tile<__nv_fp8_e4m3, Out, dense::Way::kTogether, BM, BN, Split, dense::Linear, dense::Sums::kBlock>;

// Tiles of 64 rows: what counts is the stream of the weight, so K is cut where that fills the GPU.
template <class... C>
void run_few(const DenseParams& p, cudaStream_t stream) {
  static constexpr dense::TileInfo kInfo[] = {dense::tile_info<C>()...};
  const int chosen = dense::choose_few(kInfo, sizeof...(C), dense::Problem{p.m, p.n, p.k, 1, dense::sm_count()});
  int i = 0;
  ((chosen == i++ ? dense::launch_tile<C>(p, stream) : void()), ...);
}

}  // namespace

void dense_fp8_blocks(const DenseParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("dense_fp8: result", p.out_dtype, [&](auto t) {
    using Out = typename decltype(t)::type;
    if (p.m <= dense::kFewRows) {
      run_few<BlockTile<Out, 64, 64>, BlockTile<Out, 64, 64, 2>, BlockTile<Out, 64, 128>>(p, stream);
    } else {
      dense::Tiles<BlockTile<Out, 128, 64>, BlockTile<Out, 128, 128>>::run(p, 1, stream);
    }
  });
}

}  // namespace pyllm
