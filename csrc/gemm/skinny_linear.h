// Parameters of the skinny GEMM (few rows of x): y = epilogue(x w^T).
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/params.h"
#include "gemm/epilogue_params.h"

namespace pyllm {

constexpr int kSkinnyRows = 64;              // the largest M
constexpr int kStreamShared = 227 * 1024;    // of a CTA that has an SM to itself
constexpr int64_t kStreamLongest = 1 << 20;  // K below this: sizes of shared memory stay far inside an int

struct SkinnyLinearParams {
  const void* x;  // [M, K] of dtype; base and row stride multiples of 16 bytes
  const void* w;  // [N, K] of dtype, the same alignment; gated: N = 2F rows, gate first
  void* out;      // [M, N] (gated [M, F]) of out_dtype, contiguous
  int64_t m;      // 1 .. kSkinnyRows
  int64_t n;      // rows of w; gated: a multiple of 16
  int64_t k;
  int64_t x_stride;  // elements
  int64_t w_stride;
  DType dtype;      // bf16, fp16, e4m3
  DType out_dtype;  // bf16, fp16: dtype where that is one of them
  bool gated;
  const void* norm_weight = nullptr;  // [K] of dtype or fp32, at a multiple of 16 bytes: RMSNorm of x first; bf16 alone
  bool norm_fp32 = false;
  float eps = 0.f;
  gemm::EpilogueParams epilogue;
};

void skinny_linear(const SkinnyLinearParams& p, cudaStream_t stream);
// The kernel of few rows (M <= 8, of plain products M <= 16; x in the shared memory of a CTA); false, with nothing launched,
// where it does not serve.
bool skinny_stream(const SkinnyLinearParams& p, int sms, cudaStream_t stream);

}  // namespace pyllm
