// What the current device is, asked once per device.
#pragma once
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace pyllm {

// 90 for sm_90. A few nanoseconds: every launch asks.
inline int device_architecture() {
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  cudaGetDevice(&device);
  std::atomic<int>& slot = known[static_cast<size_t>(device) % known.size()];
  int architecture = slot.load(std::memory_order_relaxed);
  if (architecture == 0) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    architecture = major * 10 + minor;
    slot.store(architecture, std::memory_order_relaxed);
  }
  return architecture;
}

}  // namespace pyllm
