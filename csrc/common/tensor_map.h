// Tensor maps for TMA, made on the host: shape, strides, box and swizzle of a tensor in global memory. Passed to kernels by value as
// `const __grid_constant__ CUtensorMap`, so a captured CUDA graph keeps its own copy. The driver's entry point is looked up at run time:
// the library does not link libcuda, and loads on a machine without a GPU.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "params.h"

namespace pyllm {

enum class Swizzle : int { kNone = 0, k32 = 1, k64 = 2, k128 = 3 };  // bytes of a row of the box: at most the number

inline CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFP16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kFP32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

inline int64_t bytes_of(DType dtype) { return dtype == DType::kFP32 ? 4 : dtype == DType::kE4M3 ? 1 : 2; }

// sizes and box run from the innermost dimension outwards; strides[i] is the distance in ELEMENTS between neighbours of dimension i + 1
// (dimension 0 is dense). In bytes the strides and the base are multiples of 16. Reads outside `sizes` give zeros, writes are dropped.
template <int Rank>
CUtensorMap make_tensor_map(const char* name, const void* base, DType dtype, const std::array<int64_t, Rank>& sizes,
                            const std::array<int64_t, Rank - 1>& strides, const std::array<int, Rank>& box, Swizzle swizzle,
                            CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const auto error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled: a driver for CUDA 12 or newer is needed");
    }
    return reinterpret_cast<Encode>(entry);
  }();
  cuuint64_t extent[Rank], step[Rank];
  cuuint32_t tile[Rank], one[Rank];
  for (int i = 0; i < Rank; ++i) {
    extent[i] = static_cast<cuuint64_t>(sizes[i] > 0 ? sizes[i] : 1);
    tile[i] = static_cast<cuuint32_t>(box[i]);
    one[i] = 1;
    if (i > 0) step[i - 1] = static_cast<cuuint64_t>(strides[i - 1] * bytes_of(dtype));
  }
  constexpr CUtensorMapSwizzle kinds[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B,
                                          CU_TENSOR_MAP_SWIZZLE_128B};
  CUtensorMap map;
  const CUresult result =
      encode(&map, map_type(dtype), Rank, const_cast<void*>(base), extent, step, tile, one, CU_TENSOR_MAP_INTERLEAVE_NONE,
             kinds[static_cast<int>(swizzle)], promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    std::string text =
        std::string(name) + ": no tensor map for base " + std::to_string(reinterpret_cast<uintptr_t>(base) % 16) + " (mod 16)";
    for (int i = 0; i < Rank; ++i) {
      text += ", size " + std::to_string(extent[i]) + " box " + std::to_string(tile[i]);
      if (i > 0) text += " stride " + std::to_string(step[i - 1]) + " bytes";
    }
    throw std::runtime_error(text + ": bases and strides must be multiples of 16 bytes, boxes at most 256");
  }
  return map;
}

}  // namespace pyllm
