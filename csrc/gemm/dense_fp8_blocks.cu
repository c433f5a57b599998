#include "gemm/dense_fp8.h"
#include "gemm/dense_launch.cuh"

namespace pyllm {
namespace {

template <class Out, int BN>
using BlockTile = dense::Tile<__nv_fp8_e4m3, Out, dense::Way::kTogether, 128, BN, 1, dense::Linear, dense::Sums::kBlock>;

}  // namespace

void dense_fp8_blocks(const DenseParams& p, cudaStream_t stream) {
  dispatch_dtype<DType::kBF16, DType::kFP16>("dense_fp8: result", p.out_dtype, [&](auto t) {
    using Out = typename decltype(t)::type;
    dense::Tiles<BlockTile<Out, 64>, BlockTile<Out, 128>>::run(p, 1, stream);
  });
}

}  // namespace pyllm
