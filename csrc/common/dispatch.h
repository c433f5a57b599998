// Run-time value -> template argument, as a fold; the error lists what this build has.
//   dispatch<64, 128, 256>("head_dim", d, [&](auto D) { launch<D()>(...); });
//   dispatch_dtype<DType::kBF16, DType::kFP16>("x", p.dtype, [&](auto t) { using T = typename decltype(t)::type; ... });
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <sstream>
#include <stdexcept>
#include <type_traits>

#include "params.h"

namespace pyllm {

template <int... Values, class F>
void dispatch(const char* what, int value, F&& f) {
  const bool hit = ((value == Values && (f(std::integral_constant<int, Values>{}), true)) || ...);
  if (hit) return;
  std::ostringstream out;
  out << what << " is " << value << "; this build has";
  ((out << ' ' << Values), ...);
  throw std::runtime_error(out.str());
}

template <DType D>
struct CppType;
template <>
struct CppType<DType::kBF16> {
  using type = __nv_bfloat16;
};
template <>
struct CppType<DType::kFP16> {
  using type = __half;
};
template <>
struct CppType<DType::kFP32> {
  using type = float;
};
template <>
struct CppType<DType::kE4M3> {
  using type = __nv_fp8_e4m3;
};

template <DType... Types, class F>
void dispatch_dtype(const char* what, DType value, F&& f) {
  const bool hit = ((value == Types && (f(CppType<Types>{}), true)) || ...);
  if (!hit) throw std::runtime_error(std::string(what) + ": no kernel for this dtype");
}

template <class F>
void dispatch_bool(bool value, F&& f) {
  value ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace pyllm
