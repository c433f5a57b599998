// Kernel launch with programmatic dependent launch (PDL): the next kernel of the stream may start before this one ends, so
// inside a CUDA graph the ~1 us between two dependent kernels shrinks. Contract for every kernel launched here: all CTAs call
// pdl_wait() before the first read of anything a predecessor wrote and before the first write to global memory.
#pragma once
#include <cuda_runtime.h>

#include "device.h"
#include "params.h"
#ifdef __CUDACC__
#include "pdl.cuh"
#endif

namespace pyllm {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t smem = 0;
  int cluster = 1;  // CTAs of one cluster along x; grid.x is a multiple of it
};

// What a launch says when the device is not one that the kernel was built for.
inline void check_code(cudaError_t error, const char* name) {
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) return check_launch(error, name);
  throw std::runtime_error(std::string(name) + ": this build holds no code of the kernel for sm_" + std::to_string(device_architecture()) +
                           "; kernels of Hopper's own instructions run on sm_90 alone, others where PYLLM_CUDA_ARCHS named it");
}

template <class... KernelArgs, class... Args>
void launch(const char* name, const LaunchShape& shape, cudaStream_t stream, void (*kernel)(KernelArgs...), const Args&... args) {
  if (shape.smem > 48 * 1024) {
    check_code(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.smem)), name);
  }
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (device_architecture() >= 90) {  // earlier devices refuse the attribute
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    if (shape.cluster > 8) {  // 8 is the portable limit
      check_code(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
    }
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = shape.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check_code(cudaLaunchKernelEx(&config, kernel, static_cast<KernelArgs>(args)...), name);
}

}  // namespace pyllm
