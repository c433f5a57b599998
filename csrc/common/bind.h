// The only way an op reaches the dispatcher: PYLLM_BOX checks the C++ signature against what the stable ABI can carry.
// (A C++ `float` for a schema `float` silently reads 0, so it must be `double`; `int` must be `int64_t`.)
#pragma once
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>

#include "check.h"

// Weak, so that the library also loads beside a CPU build of torch, where no CUDA kernel can be called.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace pyllm {

template <class T>
inline constexpr bool kBoxable = false;
template <>
inline constexpr bool kBoxable<Tensor> = true;
template <>
inline constexpr bool kBoxable<int64_t> = true;
template <>
inline constexpr bool kBoxable<double> = true;
template <>
inline constexpr bool kBoxable<bool> = true;
template <class T>
inline constexpr bool kBoxable<std::optional<T>> = kBoxable<T>;

template <class R, class... Args>
constexpr bool boxable(R (*)(Args...)) {
  return (kBoxable<std::remove_cvref_t<Args>> && ...);
}

inline cudaStream_t stream_of(const Check& check) {
  void* stream = nullptr;
  check.require(aoti_torch_get_current_cuda_stream(check.device(), &stream) == AOTI_TORCH_SUCCESS, "device", "has no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// Makes `check`'s device current for the launch, and puts the old one back.
class DeviceScope {
 public:
  explicit DeviceScope(const Check& check) {
    cudaGetDevice(&previous_);
    if (previous_ != check.device()) cudaSetDevice(check.device());
    changed_ = previous_ != check.device();
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace pyllm

#define PYLLM_BOX(func)                                                                                               \
  ([] {                                                                                                               \
    static_assert(pyllm::boxable(&func), "parameters must be Tensor, int64_t, double, bool or std::optional of one"); \
    return TORCH_BOX(&func);                                                                                          \
  }())
