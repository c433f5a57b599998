// What a GEMM does with its sums before they are stored: one mechanism for every kernel of this folder.
//
//   v = sum * row_scale[m] * column_scale[n] + bias[n]
//   v = act(v), or of a gated product act(v of the gate's row) * (v of the up row)
//   v = softcap * tanh(v / softcap)
//   y[m, n] = round(v + residual[m, n])
//
// All in fp32 with one rounding at the end; absent terms cost a predicted branch. `n` counts rows of the weight where scales and bias are
// read and columns of the output where the residual is: of a gated product the weight has 2F rows, gate first, and the output F columns.
#pragma once
#include <cstdint>

#include "common/vec.cuh"
#include "fused/activations.cuh"
#include "gemm/epilogue_params.h"

namespace pyllm::gemm {

__device__ __forceinline__ float activate(int act, float x) {
  switch (act) {
    case fused::kSilu:
      return fused::Act<fused::kSilu, false>{}(x);
    case fused::kGelu:
      return fused::Act<fused::kGelu, false>{}(x);
    case fused::kGeluTanh:
      return fused::Act<fused::kGeluTanh, false>{}(x);
    case fused::kRelu2:
      return fused::Act<fused::kRelu2, false>{}(x);
    default:
      return x;
  }
}

// `V` neighbouring columns of row m, n .. n + V - 1; `count` of them exist (V in the inside of the matrix).
// Out: the dtype of bias, residual and result.
template <class Out, int V>
struct Epilogue {
  const EpilogueParams& p;

  __device__ __forceinline__ void scale(float (&v)[V], int m, int n, int count) const {
    if (p.row_scale != nullptr) {
      const float s = load_l2(p.row_scale + static_cast<int64_t>(m) * p.row_scale_step);
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] *= s;
    }
    if (p.column_scale != nullptr) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (i < count) v[i] *= p.column_scale[static_cast<int64_t>(n + i) * p.column_scale_step];
      }
    }
    if (p.bias != nullptr) {
      const Out* bias = static_cast<const Out*>(p.bias);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (i < count) v[i] += to_float(bias[n + i]);
      }
    }
  }

  __device__ __forceinline__ void activate(float (&v)[V]) const {
    if (p.act == kNoActivation) return;
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = gemm::activate(p.act, v[i]);
  }

  // v = act(v) * up: v holds the gate.
  __device__ __forceinline__ void gate(float (&v)[V], const float (&up)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = gemm::activate(p.act, v[i]) * up[i];
  }

  __device__ __forceinline__ void finish(float (&v)[V], int m, int n, int count) const {
    if (p.softcap != 0.f) {
      const float inverse = fused::fast_reciprocal(p.softcap);
#pragma unroll
      for (int i = 0; i < V; ++i) v[i] = p.softcap * tanhf(v[i] * inverse);
    }
    if (p.residual != nullptr) {
      const Out* row = static_cast<const Out*>(p.residual) + m * p.residual_stride + n;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (i < count) v[i] += to_float(load_l2(row + i));
      }
    }
  }

 private:
  // What a kernel wrote that may have run beside this one is read past the L1.
  static __device__ __forceinline__ float load_l2(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
    return x;
  }
  static __device__ __forceinline__ Out load_l2(const Out* from) {
    static_assert(sizeof(Out) == 2, "results are bf16 or fp16");
    unsigned short bits;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");
    return reinterpret_cast<const Out&>(bits);
  }
};

// `count` of V neighbours to `to`; one access where all exist and `aligned` (the address is a multiple of V elements).
template <class Out, int V>
__device__ __forceinline__ void store_columns(Out* to, const float (&v)[V], int count, bool aligned) {
  if (count == V && aligned) {
    Vec<Out, V> packed;
#pragma unroll
    for (int i = 0; i < V; ++i) packed[i] = from_float<Out>(v[i]);
    store_vec(to, packed);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (i < count) to[i] = from_float<Out>(v[i]);
    }
  }
}

}  // namespace pyllm::gemm
