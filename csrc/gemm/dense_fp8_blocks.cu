#include "gemm/dense_fp8.h"
#include "gemm/dense_launch.cuh"

namespace pyllm {
namespace {

template <class Out, dense::Way Way, int BM, int BN, int ClusterN>
using BlockTile = dense::Tile<__nv_fp8_e4m3, Out, Way, BM, BN, 1, ClusterN, 1, dense::Linear, dense::Sums::kBlock>;

}  // namespace

void dense_fp8_blocks(const DenseParams& p, cudaStream_t stream) {
  using enum dense::Way;
  dispatch_dtype<DType::kBF16, DType::kFP16>("dense_fp8: result", p.out_dtype, [&](auto t) {
    using Out = typename decltype(t)::type;
    dense::Tiles<BlockTile<Out, kTogether, 256, 128, 1>, BlockTile<Out, kTogether, 128, 128, 1>,
                 BlockTile<Out, kTogether, 128, 64, 1>>::run(p, 1, stream);
  });
}

}  // namespace pyllm
