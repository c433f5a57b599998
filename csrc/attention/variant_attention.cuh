// variant_attention: the kernels that NVRTC compiles for one variant, element type and pair of head dims. The generated source
// (pyllm/jit/source.py) defines the struct `Variant` and the macros PYLLM_ELEMENT, PYLLM_FP8 (e4m3 keys), PYLLM_DIM (D), PYLLM_VALUE_DIM
// (Dv) ahead of this file. Data flow, limits: simple_attention.cuh.
#pragma once
#include "attention/simple_attention.cuh"

extern "C" __global__ void __launch_bounds__(pyllm::attention::kSimpleThreads)
    variant_many(const __grid_constant__ pyllm::SimpleAttentionParams p) {
  pyllm::attention::simple_attention<PYLLM_ELEMENT, PYLLM_FP8, PYLLM_DIM, PYLLM_VALUE_DIM, false, Variant>(p);
}
extern "C" __global__ void __launch_bounds__(pyllm::attention::kSimpleThreads)
    variant_few(const __grid_constant__ pyllm::SimpleAttentionParams p) {
  pyllm::attention::simple_attention<PYLLM_ELEMENT, PYLLM_FP8, PYLLM_DIM, PYLLM_VALUE_DIM, true, Variant>(p);
}
extern "C" __global__ void __launch_bounds__(pyllm::attention::kSimpleThreads)
    variant_combine(const __grid_constant__ pyllm::SimpleAttentionParams p) {
  pyllm::attention::simple_combine<PYLLM_ELEMENT, PYLLM_VALUE_DIM>(p);
}
