// CUDA implementations of rms_norm, layer_norm and quantize_fp8: argument checks, allocation, Params, launch.
#include "common/bind.h"
#include "norm/layer_norm.h"
#include "norm/quantize_fp8.h"
#include "norm/rms_norm.h"

#include <tuple>

namespace pyllm {
namespace {

constexpr auto kBF16 = ScalarType::BFloat16, kFP16 = ScalarType::Half, kFP32 = ScalarType::Float, kE4M3 = ScalarType::Float8_e4m3fn;

int64_t item_size(const Tensor& t) { return t.scalar_type() == kFP32 ? 4 : 2; }

void check_rows(Check& check, const Tensor& t, const char* name) {
  check(t, name).shape({"T", "N"}).dtype({kBF16, kFP16, kFP32});
  const int64_t rows = check["T"], n = check["N"];
  check.require(n % 8 == 0 && n >= 8 && n <= 32768, name, ".size(1) is ", n, ", expected a multiple of 8 from 8 to 32768");
  check.require(rows < int64_t{1} << 31, name, ".size(0) is ", rows, ", expected less than 2^31");
  check(t, name).rows().aligned(16, item_size(t));
}

void check_columns(Check& check, const Tensor& t, const char* name, const Tensor& x) {
  check(t, name).shape({"N"}).contiguous().aligned(16, item_size(t));
  check.require(t.scalar_type() == x.scalar_type() || t.scalar_type() == kFP32, name, "is ", name_of(t.scalar_type()), ", expected ",
                name_of(x.scalar_type()), " like x or float32");
}

void check_scale(Check& check, const std::optional<Tensor>& scale, bool expected) {
  check.require(
      scale.has_value() == expected, "scale",
      expected ? "is missing, expected a float32 tensor [1] with quant static" : "is given, expected none unless quant is static");
  if (expected) check(*scale, "scale").shape({"1"}).dtype({kFP32});
}

std::tuple<Tensor, Tensor> run_norm(Check& check, void (*kernel)(const NormParams&, cudaStream_t), const Tensor& x, const Tensor& weight,
                                    const std::optional<Tensor>& bias, double eps, const std::optional<Tensor>& residual, int64_t quant,
                                    const std::optional<Tensor>& scale) {
  check_rows(check, x, "x");
  const int64_t rows = check["T"], n = check["N"];
  check_columns(check, weight, "weight", x);
  if (bias) {
    check_columns(check, *bias, "bias", x);
    check(*bias, "bias").dtype_like(weight, "weight");
  }
  if (residual) {
    check_rows(check, *residual, "residual");
    check(*residual, "residual").dtype_like(x, "x");
    check.require(rows <= 1 || residual->stride(0) >= n, "residual", ".stride(0) is ", residual->stride(0), ", expected at least N=", n,
                  ": its rows are written");
  }
  check.require(quant >= 0 && quant <= 2, "quant", "is ", quant, ", expected 0 (none), 1 (token) or 2 (static)");
  const auto mode = static_cast<NormQuant>(quant);
  check_scale(check, scale, mode == NormQuant::kStatic);

  Tensor out = new_tensor(x, {rows, n}, mode == NormQuant::kNone ? x.scalar_type() : kE4M3);
  Tensor scale_out = new_tensor(x, {mode == NormQuant::kToken ? rows : 0}, kFP32);
  if (rows == 0) return {out, scale_out};
  NormParams p{.x = x.data_ptr(),
               .x_stride = x.stride(0),
               .weight = weight.data_ptr(),
               .bias = bias ? bias->data_ptr() : nullptr,
               .residual = residual ? residual->data_ptr() : nullptr,
               .residual_stride = residual ? residual->stride(0) : 0,
               .out = out.data_ptr(),
               .scale = scale ? static_cast<const float*>(scale->data_ptr()) : nullptr,
               .scale_out = static_cast<float*>(scale_out.data_ptr()),
               .rows = rows,
               .n = static_cast<int>(n),
               .eps = static_cast<float>(eps),
               .dtype = dtype_of(x),
               .weight_dtype = dtype_of(weight),
               .quant = mode};
  const DeviceScope device(check);
  kernel(p, stream_of(check));
  return {out, scale_out};
}

std::tuple<Tensor, Tensor> rms_norm_cuda(const Tensor& x, const Tensor& weight, double eps, const std::optional<Tensor>& residual,
                                         int64_t quant, const std::optional<Tensor>& scale) {
  Check check("rms_norm");
  return run_norm(check, &rms_norm, x, weight, std::nullopt, eps, residual, quant, scale);
}

std::tuple<Tensor, Tensor> layer_norm_cuda(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
                                           const std::optional<Tensor>& residual, int64_t quant, const std::optional<Tensor>& scale) {
  Check check("layer_norm");
  return run_norm(check, &layer_norm, x, weight, bias, eps, residual, quant, scale);
}

std::tuple<Tensor, Tensor> quantize_fp8_cuda(const Tensor& x, int64_t mode, const std::optional<Tensor>& scale) {
  Check check("quantize_fp8");
  check_rows(check, x, "x");
  check.require(mode >= 1 && mode <= 4, "mode", "is ", mode, ", expected 1 (token), 2 (static), 3 (tensor) or 4 (group)");
  const auto how = static_cast<QuantMode>(mode);
  check_scale(check, scale, how == QuantMode::kStatic);

  const int64_t rows = check["T"], n = check["N"];
  const bool one_scale = how == QuantMode::kStatic || how == QuantMode::kTensor;
  Tensor out = new_tensor(x, {rows, n}, kE4M3);
  Tensor scale_out = how == QuantMode::kGroup ? new_tensor(x, {rows, (n + kQuantGroup - 1) / kQuantGroup}, kFP32)
                                              : new_tensor(x, {one_scale ? 1 : rows}, kFP32);
  if (rows == 0 && !one_scale) return {out, scale_out};
  Tensor partials = new_tensor(x, {how == QuantMode::kTensor ? kMaxQuantPartials : 0}, kFP32);
  QuantizeParams p{.x = x.data_ptr(),
                   .x_stride = x.stride(0),
                   .out = static_cast<uint8_t*>(out.data_ptr()),
                   .scale = scale ? static_cast<const float*>(scale->data_ptr()) : nullptr,
                   .scale_out = static_cast<float*>(scale_out.data_ptr()),
                   .partials = static_cast<float*>(partials.data_ptr()),
                   .rows = rows,
                   .n = static_cast<int>(n),
                   .dtype = dtype_of(x),
                   .mode = how};
  const DeviceScope device(check);
  quantize_fp8(p, stream_of(check));
  return {out, scale_out};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) {
  m.impl("rms_norm", PYLLM_BOX(rms_norm_cuda));
  m.impl("layer_norm", PYLLM_BOX(layer_norm_cuda));
  m.impl("quantize_fp8", PYLLM_BOX(quantize_fp8_cuda));
}

}  // namespace pyllm
