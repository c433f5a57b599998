#include "gemm/dense_e4m3.cuh"

#include "gemm/dense_e4m3.h"

namespace pyllm {

// The tiles of gated products in bf16: dense_launch.cuh says why the wider one is there.
void dense_e4m3(const DenseParams& p, cudaStream_t stream) {
  using dense::NarrowTile;
  dispatch_dtype<DType::kBF16, DType::kE4M3>("dense_e4m3: x", p.dtype, [&](auto t) {
    using T = typename decltype(t)::type;
    if (p.gated) {
      dense::Tiles<NarrowTile<T, true, 128>, NarrowTile<T, true, 160>>::run(p, sizeof(T), stream);
    } else {
      dense::Tiles<NarrowTile<T, false, 128>>::run(p, sizeof(T), stream);
    }
  });
}

}  // namespace pyllm
