// Programmatic dependent launch, the device side; nothing on devices before sm_90, where launch.h starts kernels without it.
#pragma once

namespace pyllm {

// Blocks until every kernel this one depends on has finished (or triggered) and its writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start its prologue; its pdl_wait() still waits for all of this kernel's writes.
__device__ __forceinline__ void pdl_trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace pyllm
