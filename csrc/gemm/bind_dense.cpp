// CUDA implementations of dense_linear, linear_fp8, linear_e4m3 and linear_int8: argument checks, allocation, Params, launch.
#include "common/bind.h"
#include "gemm/dense_e4m3.h"
#include "gemm/dense_fp8.h"
#include "gemm/dense_int8.h"
#include "gemm/dense_linear.h"
#include "gemm/skinny_linear.h"

#include <cmath>
#include <tuple>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;
constexpr auto kBF16 = ScalarType::BFloat16, kFP16 = ScalarType::Half, kFP32 = ScalarType::Float, kE4M3 = ScalarType::Float8_e4m3fn,
               kInt8 = ScalarType::Char;
constexpr int64_t kBlock = 128;
constexpr int64_t kStreamRows = 16;  // e4m3: measured, the skinny kernel is ahead up to 16 rows, at 64 it takes twice the time

void check_operands(Check& check, const Tensor& x, const Tensor& weight, std::initializer_list<ScalarType> dtypes, int64_t granule) {
  check(x, "x").shape({"M", "K"}).dtype(dtypes);
  check(weight, "weight").shape({"N", "K"}).dtype_like(x, "x");
  const int64_t item = x.element_size(), limit = int64_t{1} << 31;
  const int64_t m = check["M"], n = check["N"], k = check["K"];
  check.require(m < limit, "x", ".size(0) is ", m, ", expected less than 2^31");
  check.require(k >= 16 && k < limit && k % granule == 0, "x", ".size(1) is ", k, ", expected a multiple of ", granule,
                " from 16 to 2^31 - 1");
  check.require(n >= 16 && n < limit && n % granule == 0, "weight", ".size(0) is ", n, ", expected a multiple of ", granule,
                " from 16 to 2^31 - 1");
  check(x, "x").rows().aligned(16, item);
  check(weight, "weight").rows().aligned(16, item);
}

const void* check_vector(Check& check, const OptionalTensor& t, const char* name, const char* letter, ScalarType dtype) {
  if (!t.has_value()) return nullptr;
  check(*t, name).shape({letter}).dtype({dtype}).contiguous();
  return t->data_ptr();
}

// One scale for all, or one per row of the matrix that `letter` counts.
void check_scale(Check& check, const Tensor& t, const char* name, const char* letter, const float*& scale, int& step) {
  check(t, name).shape({"_"}).dtype({kFP32}).contiguous();
  const int64_t got = t.size(0), rows = check[letter];
  check.require(got == 1 || got == rows, name, ".size(0) is ", got, ", expected 1 or ", letter, "=", rows);
  scale = static_cast<const float*>(t.data_ptr());
  step = got == 1 ? 0 : 1;
}

void check_blocks(Check& check, const Tensor& t, const char* name, int64_t rows, int64_t columns, const float*& scale, int64_t& stride) {
  check(t, name).shape({"_", "_"}).dtype({kFP32}).rows();
  check.require(t.size(0) == rows && t.size(1) == columns, name, "has shape [", t.size(0), ", ", t.size(1), "], expected [", rows, ", ",
                columns, "]");
  scale = static_cast<const float*>(t.data_ptr());
  stride = t.stride(0);
}

void check_scales(Check& check, DenseParams& p, const Tensor& x_scale, const Tensor& weight_scale) {
  if (x_scale.dim() != 2) {
    check_scale(check, x_scale, "x_scale", "M", p.epilogue.row_scale, p.epilogue.row_scale_step);
    check_scale(check, weight_scale, "weight_scale", "N", p.epilogue.column_scale, p.epilogue.column_scale_step);
    return;
  }
  const int64_t blocks = (p.k + kBlock - 1) / kBlock;
  check_blocks(check, x_scale, "x_scale", p.m, blocks, p.x_blocks, p.x_blocks_stride);
  check_blocks(check, weight_scale, "weight_scale", (p.n + kBlock - 1) / kBlock, blocks, p.w_blocks, p.w_blocks_stride);
}

DenseParams params_of(const Check& check, const Tensor& x, const Tensor& weight, DType dtype, bool fp16) {
  return {.x = x.data_ptr(),
          .w = weight.data_ptr(),
          .m = check["M"],
          .n = check["N"],
          .k = check["K"],
          .x_stride = x.stride(0),
          .w_stride = weight.stride(0),
          .dtype = dtype,
          .out_dtype = fp16 ? DType::kFP16 : DType::kBF16};
}

void check_residual(Check& check, DenseParams& p, const Tensor& x, const Tensor& residual, int64_t columns) {
  check(residual, "residual").shape({"M", "_"}).dtype_like(x, "x").rows().aligned(16, 2);
  check.require(residual.size(1) == columns, "residual", ".size(1) is ", residual.size(1), ", expected ", columns);
  p.epilogue.residual = residual.data_ptr();
  p.epilogue.residual_stride = residual.stride(0);
}

Tensor dense_linear_cuda(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                         int64_t act, bool gated, double softcap) {
  Check check("dense_linear");
  check_operands(check, x, weight, {kBF16, kFP16}, 8);
  DenseParams p = params_of(check, x, weight, dtype_of(x), x.scalar_type() == kFP16);
  check.require(!gated || p.n % 16 == 0, "weight", ".size(0) is ", p.n, ", expected a multiple of 16 with gated");
  check.require(act >= -1 && act <= 3, "act", "is ", act, ", expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)");
  check.require(softcap >= 0.0 && std::isfinite(softcap), "softcap", "is ", softcap, ", expected finite and >= 0");
  const int64_t columns = gated ? p.n / 2 : p.n;
  p.gated = gated;
  p.epilogue.bias = check_vector(check, bias, "bias", "N", x.scalar_type());
  p.epilogue.act = static_cast<int>(act);
  p.epilogue.softcap = static_cast<float>(softcap);
  if (residual.has_value()) check_residual(check, p, x, *residual, columns);
  Tensor out = new_tensor(x, {p.m, columns}, x.scalar_type());
  if (p.m == 0) return out;
  p.out = out.data_ptr();
  const DeviceScope device(check);
  dense_linear(p, stream_of(check));
  return out;
}

std::tuple<Tensor, Tensor> linear_squares_cuda(const Tensor& x, const Tensor& weight, const Tensor& residual,
                                               const std::optional<Tensor>& bias) {
  Check check("linear_squares");
  check_operands(check, x, weight, {kBF16, kFP16}, 8);
  DenseParams p = params_of(check, x, weight, dtype_of(x), x.scalar_type() == kFP16);
  p.epilogue.bias = check_vector(check, bias, "bias", "N", x.scalar_type());
  check_residual(check, p, x, residual, p.n);
  Tensor out = new_tensor(x, {p.m, p.n}, x.scalar_type()), squares = new_tensor(x, {p.m, (p.n + kBlock - 1) / kBlock}, kFP32);
  if (p.m == 0) return {out, squares};
  p.out = out.data_ptr();
  p.epilogue.squares = static_cast<float*>(squares.data_ptr());
  const DeviceScope device(check);
  dense_linear(p, stream_of(check));
  return {out, squares};
}

Tensor linear_normed_cuda(const Tensor& x, const Tensor& squares, double eps, const Tensor& weight, const std::optional<Tensor>& bias,
                          int64_t act, bool gated) {
  Check check("linear_normed");
  check_operands(check, x, weight, {kBF16, kFP16}, 8);
  DenseParams p = params_of(check, x, weight, dtype_of(x), x.scalar_type() == kFP16);
  check.require(!gated || p.n % 16 == 0, "weight", ".size(0) is ", p.n, ", expected a multiple of 16 with gated");
  check.require(act >= -1 && act <= 3, "act", "is ", act, ", expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)");
  check.require(eps >= 0.0 && std::isfinite(eps), "eps", "is ", eps, ", expected finite and >= 0");
  check(squares, "squares").shape({"M", "_"}).dtype({kFP32}).contiguous();
  const int64_t parts = (p.k + kBlock - 1) / kBlock;
  check.require(squares.size(1) == parts, "squares", ".size(1) is ", squares.size(1), ", expected ", parts);
  p.gated = gated;
  p.epilogue.bias = check_vector(check, bias, "bias", "N", x.scalar_type());
  p.epilogue.act = static_cast<int>(act);
  p.epilogue.x_squares = static_cast<const float*>(squares.data_ptr());
  p.epilogue.x_squares_count = static_cast<int>(parts);
  p.epilogue.eps = static_cast<float>(eps);
  Tensor out = new_tensor(x, {p.m, gated ? p.n / 2 : p.n}, x.scalar_type());
  if (p.m == 0) return out;
  p.out = out.data_ptr();
  const DeviceScope device(check);
  dense_linear(p, stream_of(check));
  return out;
}

Tensor run_fp8(Check& check, DenseParams& p, const Tensor& x, const OptionalTensor& bias, bool fp16) {
  p.epilogue.bias = check_vector(check, bias, "bias", "N", fp16 ? kFP16 : kBF16);
  Tensor out = new_tensor(x, {p.m, p.gated ? p.n / 2 : p.n}, fp16 ? kFP16 : kBF16);
  if (p.m == 0) return out;
  p.out = out.data_ptr();
  const DeviceScope device(check);
  if (p.m > kStreamRows || p.x_blocks != nullptr) {
    dense_fp8(p, stream_of(check));
  } else {
    skinny_linear({.x = p.x,
                   .w = p.w,
                   .out = p.out,
                   .m = p.m,
                   .n = p.n,
                   .k = p.k,
                   .x_stride = p.x_stride,
                   .w_stride = p.w_stride,
                   .dtype = p.dtype,
                   .out_dtype = p.out_dtype,
                   .gated = p.gated,
                   .epilogue = p.epilogue},
                  stream_of(check));
  }
  return out;
}

Tensor linear_fp8_cuda(const Tensor& x, const Tensor& weight, const Tensor& x_scale, const Tensor& weight_scale,
                       const std::optional<Tensor>& bias, bool fp16) {
  Check check("linear_fp8");
  check_operands(check, x, weight, {kE4M3}, 16);
  DenseParams p = params_of(check, x, weight, DType::kE4M3, fp16);
  check_scales(check, p, x_scale, weight_scale);
  return run_fp8(check, p, x, bias, fp16);
}

Tensor linear_fp8_gated_cuda(const Tensor& x, const Tensor& weight, const Tensor& x_scale, const Tensor& weight_scale,
                             const std::optional<Tensor>& bias, bool fp16, int64_t act) {
  Check check("linear_fp8_gated");
  check_operands(check, x, weight, {kE4M3}, 16);
  DenseParams p = params_of(check, x, weight, DType::kE4M3, fp16);
  check_scale(check, x_scale, "x_scale", "M", p.epilogue.row_scale, p.epilogue.row_scale_step);
  check_scale(check, weight_scale, "weight_scale", "N", p.epilogue.column_scale, p.epilogue.column_scale_step);
  check.require(act >= 0 && act <= 3, "act", "is ", act, ", expected 0 to 3 (silu, gelu, gelu_tanh, relu2)");
  p.gated = true;
  p.epilogue.act = static_cast<int>(act);
  return run_fp8(check, p, x, bias, fp16);
}

Tensor linear_e4m3_cuda(const Tensor& x, const Tensor& weight, const Tensor& out_scale, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& x_scale, const std::optional<Tensor>& weight_scale, int64_t act, bool gated) {
  Check check("linear_e4m3");
  const bool fp8 = x.scalar_type() == kE4M3;
  check_operands(check, x, weight, {kBF16, kE4M3}, fp8 ? 16 : 8);
  DenseParams p = params_of(check, x, weight, dtype_of(x), false);
  p.out_dtype = DType::kE4M3;
  p.gated = gated;
  const int64_t columns = gated ? p.n / 2 : p.n, unit = gated ? 32 : 16;
  check.require(p.n % unit == 0, "weight", ".size(0) is ", p.n, ", expected a multiple of ", unit, gated ? " with gated" : "");
  check.require(act >= -1 && act <= 3, "act", "is ", act, ", expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)");
  check.require(act >= 0 || !gated, "act", "is -1, expected 0 to 3 with gated");
  p.epilogue.act = static_cast<int>(act);
  check(out_scale, "out_scale").shape({"_"}).dtype({kFP32});
  check.require(out_scale.size(0) == 1, "out_scale", ".size(0) is ", out_scale.size(0), ", expected 1");
  p.epilogue.out_scale = static_cast<const float*>(out_scale.data_ptr());
  if (bias.has_value()) {
    check(*bias, "bias").shape({"N"}).dtype({kBF16, kFP16}).contiguous();
    p.epilogue.bias = bias->data_ptr();
    p.epilogue.bias_fp16 = bias->scalar_type() == kFP16;
  }
  for (const auto& [scale, name] : {std::pair{&x_scale, "x_scale"}, std::pair{&weight_scale, "weight_scale"}}) {
    check.require(scale->has_value() == fp8, name,
                  fp8 ? "is missing, expected one with float8_e4m3fn" : "is given, expected none with bfloat16");
  }
  if (fp8) {
    check_scale(check, *x_scale, "x_scale", "M", p.epilogue.row_scale, p.epilogue.row_scale_step);
    check_scale(check, *weight_scale, "weight_scale", "N", p.epilogue.column_scale, p.epilogue.column_scale_step);
  }
  Tensor out = new_tensor(x, {p.m, columns}, kE4M3);
  if (p.m == 0) return out;
  p.out = out.data_ptr();
  const DeviceScope device(check);
  dense_e4m3(p, stream_of(check));
  return out;
}

Tensor linear_int8_cuda(const Tensor& x, const Tensor& weight, const Tensor& x_scale, const Tensor& weight_scale,
                        const std::optional<Tensor>& bias, bool fp16) {
  Check check("linear_int8");
  check_operands(check, x, weight, {kInt8}, 16);
  check.require(check["K"] < int64_t{1} << 17, "x", ".size(1) is ", check["K"], ", expected less than 2^17: sums are int32");
  DenseParams p = params_of(check, x, weight, DType::kE4M3, fp16);
  check_scale(check, x_scale, "x_scale", "M", p.epilogue.row_scale, p.epilogue.row_scale_step);
  check_scale(check, weight_scale, "weight_scale", "N", p.epilogue.column_scale, p.epilogue.column_scale_step);
  p.epilogue.bias = check_vector(check, bias, "bias", "N", fp16 ? kFP16 : kBF16);
  Tensor out = new_tensor(x, {p.m, p.n}, fp16 ? kFP16 : kBF16);
  if (p.m == 0) return out;
  p.out = out.data_ptr();
  const DeviceScope device(check);
  dense_int8(p, stream_of(check));
  return out;
}

}  // namespace
}  // namespace pyllm

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) {
  m.impl("dense_linear", PYLLM_BOX(pyllm::dense_linear_cuda));
  m.impl("linear_fp8", PYLLM_BOX(pyllm::linear_fp8_cuda));
  m.impl("linear_fp8_gated", PYLLM_BOX(pyllm::linear_fp8_gated_cuda));
  m.impl("linear_e4m3", PYLLM_BOX(pyllm::linear_e4m3_cuda));
  m.impl("linear_squares", PYLLM_BOX(pyllm::linear_squares_cuda));
  m.impl("linear_normed", PYLLM_BOX(pyllm::linear_normed_cuda));
  m.impl("linear_int8", PYLLM_BOX(pyllm::linear_int8_cuda));
}
