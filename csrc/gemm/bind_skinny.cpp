// CUDA implementation of skinny_linear: argument checks, allocation, Params, launch.
#include "common/bind.h"
#include "gemm/skinny_linear.h"

#include <cmath>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;
constexpr auto kBF16 = ScalarType::BFloat16, kFP16 = ScalarType::Half, kFP32 = ScalarType::Float, kE4M3 = ScalarType::Float8_e4m3fn;

void check_matrix(Check& check, const Tensor& t, const char* name) {
  const int64_t item = t.element_size();
  const int64_t width = t.size(1);
  check.require(width > 0 && width * item % 16 == 0, name, ".size(1) is ", width, ", expected a multiple of ", 16 / item, ", at least ",
                16 / item);
  check(t, name).rows().aligned(16, item);
}

const void* check_vector(Check& check, const OptionalTensor& t, const char* name, const char* letter,
                         std::initializer_list<ScalarType> dtypes) {
  if (!t.has_value()) return nullptr;
  check(*t, name).shape({letter}).dtype(dtypes).contiguous();
  return t->data_ptr();
}

void check_norm(Check& check, SkinnyLinearParams& p, const Tensor& x, const OptionalTensor& weight, double eps) {
  if (!weight.has_value()) return;
  check.require(x.scalar_type() == kBF16, "norm_weight", "is given, expected None unless x is bfloat16");
  p.norm_weight = check_vector(check, weight, "norm_weight", "K", {kBF16, kFP32});
  check.require(reinterpret_cast<uintptr_t>(p.norm_weight) % 16 == 0, "norm_weight",
                "starts at an address that is not a multiple of 16 bytes");
  p.norm_fp32 = weight->scalar_type() == kFP32;
  p.eps = static_cast<float>(eps);
}

void check_epilogue(Check& check, SkinnyLinearParams& p, ScalarType out, bool e4m3, const OptionalTensor& bias,
                    const OptionalTensor& residual, const OptionalTensor& x_scale, const OptionalTensor& weight_scale, int64_t act,
                    double softcap) {
  check.require(act >= -1 && act <= 3, "act", "is ", act, ", expected -1 to 3 (none, silu, gelu, gelu_tanh, relu2)");
  check.require(softcap >= 0.0 && std::isfinite(softcap), "softcap", "is ", softcap, ", expected finite and >= 0");
  check.require(e4m3 || !x_scale.has_value(), "x_scale", "is given, expected None unless x is float8_e4m3fn");
  check.require(e4m3 || !weight_scale.has_value(), "weight_scale", "is given, expected None unless x is float8_e4m3fn");
  gemm::EpilogueParams& e = p.epilogue;
  e.row_scale = static_cast<const float*>(check_vector(check, x_scale, "x_scale", "M", {kFP32}));
  e.column_scale = static_cast<const float*>(check_vector(check, weight_scale, "weight_scale", "N", {kFP32}));
  e.row_scale_step = e.column_scale_step = 1;
  e.bias = check_vector(check, bias, "bias", "N", {out});
  e.act = static_cast<int>(act);
  e.softcap = static_cast<float>(softcap);
  if (!residual.has_value()) return;
  check(*residual, "residual").shape({"M", p.gated ? "F" : "N"}).dtype({out}).rows();
  const int64_t columns = p.gated ? p.n / 2 : p.n;
  check.require(residual->size(1) == columns, "residual", ".size(1) is ", residual->size(1), ", expected ", columns);
  e.residual = residual->data_ptr();
  e.residual_stride = residual->stride(0);
}

Tensor skinny_linear_cuda(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                          const std::optional<Tensor>& x_scale, const std::optional<Tensor>& weight_scale, int64_t act, bool gated,
                          double softcap, const std::optional<Tensor>& norm_weight, double eps, bool fp16) {
  Check check("skinny_linear");
  check(x, "x").shape({"M", "K"}).dtype({kBF16, kFP16, kE4M3});
  check(weight, "weight").shape({"N", "K"}).dtype_like(x, "x");
  const int64_t m = check["M"], n = check["N"], k = check["K"];
  check.require(m <= kSkinnyRows, "x", ".size(0) is ", m, ", expected at most ", kSkinnyRows);
  check.require(n >= 1 && n < int64_t{1} << 31, "weight", ".size(0) is ", n, ", expected 1 to 2^31 - 1");
  check.require(k < int64_t{1} << 31, "x", ".size(1) is ", k, ", expected less than 2^31");
  check.require(!gated || n % 16 == 0, "weight", ".size(0) is ", n, ", expected a multiple of 16 with gated");
  check_matrix(check, x, "x");
  check_matrix(check, weight, "weight");
  const bool e4m3 = x.scalar_type() == kE4M3;
  const ScalarType out_type = fp16 ? kFP16 : kBF16;
  check.require(e4m3 || x.scalar_type() == out_type, "fp16", "is ", fp16 ? "True" : "False", ", expected ", fp16 ? "False" : "True",
                " because x is ", name_of(x.scalar_type()));
  SkinnyLinearParams p{.x = x.data_ptr(),
                       .w = weight.data_ptr(),
                       .m = m,
                       .n = n,
                       .k = k,
                       .x_stride = x.stride(0),
                       .w_stride = weight.stride(0),
                       .dtype = dtype_of(x),
                       .out_dtype = fp16 ? DType::kFP16 : DType::kBF16,
                       .gated = gated};
  check_epilogue(check, p, out_type, e4m3, bias, residual, x_scale, weight_scale, act, softcap);
  check_norm(check, p, x, norm_weight, eps);
  Tensor out = new_tensor(x, {m, gated ? n / 2 : n}, out_type);
  if (m == 0) return out;
  p.out = out.data_ptr();
  const DeviceScope device(check);
  skinny_linear(p, stream_of(check));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) { m.impl("skinny_linear", PYLLM_BOX(skinny_linear_cuda)); }

}  // namespace pyllm
