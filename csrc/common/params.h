// What the torch-free side and bind.cpp share: dtypes as an enum, and the error of a failed launch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace pyllm {

enum class DType : int { kBF16, kFP16, kFP32, kE4M3 };

inline void check_launch(cudaError_t error, const char* kernel) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(kernel) + ": launch failed: " + cudaGetErrorString(error));
}

}  // namespace pyllm
