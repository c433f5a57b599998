// Registers the CUDA kernels of csrc/fused: checks, allocation, Params, launch. Schemas and CPU references: pyllm/ops/fused.py, rope.py.
#include "common/bind.h"
#include "fused/act.h"
#include "fused/act_mul.h"
#include "fused/act_mul_fp8.h"
#include "fused/embed_tokens.h"
#include "fused/qk_norm_rope_append.h"
#include "fused/softcap.h"

#include <tuple>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr std::initializer_list<ScalarType> kFloats = {ScalarType::BFloat16, ScalarType::Half, ScalarType::Float};
constexpr int64_t kMaxVocab = int64_t{1} << 27;  // softcap: 8 rows fit one launch
constexpr int64_t kMaxFp8Row = 32768;            // act_mul_fp8 holds a row in registers
constexpr const char* kRope = "qk_norm_rope_append";

// A matrix of dense rows at multiples of 16 bytes, a multiple of `multiple` elements long: what 16-byte accesses need.
void check_rows(Check& check, const Tensor& x, const char* name, std::initializer_list<const char*> shape, int64_t multiple = 8) {
  check(x, name).shape(shape).dtype(kFloats);
  const int64_t width = x.size(1);
  check.require(width > 0 && width % multiple == 0, name, ".size(1) is ", width, ", expected a multiple of ", multiple, ", at least ",
                multiple);
  check(x, name).rows().aligned(16, x.element_size());
}

void check_act(Check& check, int64_t act) {
  check.require(act >= 0 && act <= 3, "act", "is ", act, ", expected 0 to 3 (silu, gelu, gelu_tanh, relu2)");
}

Tensor act_cuda(const Tensor& x, int64_t kind) {
  Check check("act");
  check_rows(check, x, "x", {"T", "F"});
  check_act(check, kind);
  Tensor out = new_tensor(x, {x.size(0), x.size(1)}, x.scalar_type());
  if (x.size(0) == 0) return out;
  const DeviceScope device(check);
  act({.x = x.data_ptr(),
       .out = out.data_ptr(),
       .tokens = x.size(0),
       .width = x.size(1),
       .x_stride = x.stride(0),
       .dtype = dtype_of(x),
       .act = static_cast<int>(kind)},
      stream_of(check));
  return out;
}

Tensor act_mul_cuda(const Tensor& x, int64_t kind) {
  Check check("act_mul");
  check_rows(check, x, "x", {"T", "2F"}, 16);
  check_act(check, kind);
  const int64_t width = x.size(1) / 2;
  Tensor out = new_tensor(x, {x.size(0), width}, x.scalar_type());
  if (x.size(0) == 0) return out;
  const DeviceScope device(check);
  act_mul({.x = x.data_ptr(),
           .out = out.data_ptr(),
           .tokens = x.size(0),
           .width = width,
           .x_stride = x.stride(0),
           .dtype = dtype_of(x),
           .act = static_cast<int>(kind)},
          stream_of(check));
  return out;
}

// q [T, F]; scales: [T] to write, or the given one to read.
Tensor run_act_mul_fp8(Check& check, const Tensor& x, int64_t kind, float* scales, const float* given) {
  check_act(check, kind);
  const int64_t rows = x.size(0), width = x.size(1) / 2;
  check.require(width <= kMaxFp8Row, "x", ".size(1) is ", x.size(1), ", expected at most ", 2 * kMaxFp8Row);
  check.require(rows < int64_t{1} << 28, "x", ".size(0) is ", rows, ", expected less than 2^28");
  Tensor out = new_tensor(x, {rows, width}, ScalarType::Float8_e4m3fn);
  if (rows == 0) return out;
  const DeviceScope device(check);
  act_mul_fp8({.x = x.data_ptr(),
               .x_stride = x.stride(0),
               .out = static_cast<uint8_t*>(out.data_ptr()),
               .scale_out = scales,
               .rows = rows,
               .n = static_cast<int>(width),
               .dtype = dtype_of(x),
               .act = static_cast<int>(kind),
               .scale = given},
              stream_of(check));
  return out;
}

std::tuple<Tensor, Tensor> act_mul_fp8_cuda(const Tensor& x, int64_t kind) {
  Check check("act_mul_fp8");
  check_rows(check, x, "x", {"T", "2F"}, 16);
  Tensor scale = new_tensor(x, {x.size(0)}, ScalarType::Float);
  return {run_act_mul_fp8(check, x, kind, static_cast<float*>(scale.data_ptr()), nullptr), scale};
}

Tensor act_mul_fp8_static_cuda(const Tensor& x, int64_t kind, const Tensor& scale) {
  Check check("act_mul_fp8_static");
  check_rows(check, x, "x", {"T", "2F"}, 16);
  check(scale, "scale").shape({"_"}).dtype({ScalarType::Float});
  check.require(scale.size(0) == 1, "scale", ".size(0) is ", scale.size(0), ", expected 1");
  return run_act_mul_fp8(check, x, kind, nullptr, static_cast<const float*>(scale.data_ptr()));
}

Tensor softcap_cuda(const Tensor& x, double cap) {
  Check check("softcap");
  check(x, "x").shape({"T", "V"}).dtype(kFloats).rows();
  check.require(x.size(1) >= 1 && x.size(1) <= kMaxVocab, "x", ".size(1) is ", x.size(1), ", expected 1 to ", kMaxVocab);
  check.require(cap > 0.0 && cap < __builtin_inf(), "cap", "is ", cap, ", expected finite and > 0");
  Tensor out = new_tensor(x, {x.size(0), x.size(1)}, x.scalar_type());
  if (x.size(0) == 0) return out;
  const DeviceScope device(check);
  softcap({.x = x.data_ptr(),
           .out = out.data_ptr(),
           .tokens = x.size(0),
           .width = x.size(1),
           .x_stride = x.stride(0),
           .cap = static_cast<float>(cap),
           .dtype = dtype_of(x)},
          stream_of(check));
  return out;
}

Tensor embed_tokens_cuda(const Tensor& ids, const Tensor& weight, double scale, int64_t first) {
  Check check("embed_tokens");
  check(ids, "ids").shape({"T"}).dtype({ScalarType::Int}).contiguous();
  check_rows(check, weight, "weight", {"V", "N"});
  Tensor out = new_tensor(weight, {ids.size(0), weight.size(1)}, weight.scalar_type());
  if (ids.size(0) == 0) return out;
  const DeviceScope device(check);
  embed_tokens({.ids = static_cast<const int32_t*>(ids.data_ptr()),
                .weight = weight.data_ptr(),
                .out = out.data_ptr(),
                .tokens = ids.size(0),
                .vocab = weight.size(0),
                .width = weight.size(1),
                .weight_stride = weight.stride(0),
                .first = first,
                .scale = static_cast<float>(scale),
                .dtype = dtype_of(weight)},
               stream_of(check));
  return out;
}

void check_absent(const Check& check, const OptionalTensor& x, const char* name, const char* why) {
  check.require(!x.has_value(), name, "is given, expected None because ", why);
}

const Tensor& check_present(const Check& check, const OptionalTensor& x, const char* name, int64_t kv_heads) {
  check.require(x.has_value(), name, "is None, expected a tensor because kv_heads is ", kv_heads);
  return *x;
}

void check_rope(Check& check, QkNormRopeAppendParams& p, const OptionalTensor& cos_sin, const OptionalTensor& rows) {
  if (!cos_sin.has_value()) return check_absent(check, rows, "rows", "cos_sin is None");
  check(*cos_sin, "cos_sin").shape({"L", "R"}).dtype({ScalarType::Float}).contiguous();
  check.require(reinterpret_cast<uintptr_t>(cos_sin->data_ptr()) % 16 == 0, "cos_sin",
                "starts at an address that is not a multiple of 16 bytes");
  const int64_t r = cos_sin->size(1);
  check.require(r % 2 == 0 && r >= 2 && r <= p.dim, "cos_sin", ".size(1) is ", r, ", expected an even number from 2 to the head dimension ",
                p.dim);
  check.require(rows.has_value(), "rows", "is None, expected a tensor because cos_sin is given");
  check(*rows, "rows").shape({"T"}).dtype({ScalarType::Int}).contiguous();
  p.cos_sin = static_cast<const float*>(cos_sin->data_ptr());
  p.rows = static_cast<const int32_t*>(rows->data_ptr());
  p.rotary = static_cast<int>(r);
}

// Returns the pointer, null without a weight; fp32 says how to read it.
const void* check_weight(Check& check, const Tensor& qkv, const OptionalTensor& weight, const char* name, int64_t dim, bool& fp32) {
  if (!weight.has_value()) return nullptr;
  check(*weight, name).shape({"_"}).dtype({ScalarType::Float, qkv.scalar_type()}).contiguous();
  check.require(weight->size(0) == dim, name, ".size(0) is ", weight->size(0), ", expected D=", dim);
  fp32 = weight->scalar_type() == ScalarType::Float;
  return weight->data_ptr();
}

void check_cache(Check& check, const Tensor& qkv, const Tensor& cache, const char* name, int64_t kv_heads, int64_t dim) {
  check(cache, name).shape({"pages", "P", "_", "_"}).dtype({qkv.scalar_type(), ScalarType::Float8_e4m3fn, ScalarType::Char});
  const int64_t sizes[] = {kv_heads, dim}, strides[] = {kv_heads * dim, dim, 1};
  for (int i : {0, 1}) {
    check.require(cache.size(i + 2) == sizes[i], name, ".size(", i + 2, ") is ", cache.size(i + 2), ", expected ", "KD"[i], "=", sizes[i]);
  }
  check.require(cache.size(1) >= 1, name, ".size(1) is ", cache.size(1), ", expected >= 1");
  for (int i : {0, 1, 2}) {
    check.require(cache.size(i + 1) <= 1 || cache.stride(i + 1) == strides[i], name, ".stride(", i + 1, ") is ", cache.stride(i + 1),
                  ", expected ", strides[i], " (a page is dense)");
  }
  const int64_t item = cache.element_size(), step = cache.stride(0);
  check.require(cache.size(0) <= 1 || step * item % 16 == 0, name, ".stride(0) is ", step, " elements, expected a multiple of ", 16 / item);
  check.require(reinterpret_cast<uintptr_t>(cache.data_ptr()) % 16 == 0, name, "starts at an address that is not a multiple of 16 bytes");
}

const float* check_scale(Check& check, const OptionalTensor& scale, const char* name, int64_t kv_heads, bool byte, int& step) {
  if (!scale.has_value()) return nullptr;
  if (!byte) check_absent(check, scale, name, "the cache is neither float8_e4m3fn nor int8");
  check(*scale, name).shape({"_"}).dtype({ScalarType::Float}).contiguous();
  const int64_t n = scale->size(0);
  check.require(n == 1 || n == kv_heads, name, ".size(0) is ", n, ", expected K=", kv_heads);
  step = n == kv_heads;
  return static_cast<const float*>(scale->data_ptr());
}

void check_caches(Check& check, QkNormRopeAppendParams& p, const Tensor& qkv, const OptionalTensor& k_cache, const OptionalTensor& v_cache,
                  const OptionalTensor& slots, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  const Tensor& k = check_present(check, k_cache, "k_cache", p.kv_heads);
  const Tensor& v = check_present(check, v_cache, "v_cache", p.kv_heads);
  const Tensor& slot = check_present(check, slots, "slots", p.kv_heads);
  check_cache(check, qkv, k, "k_cache", p.kv_heads, p.dim);
  check_cache(check, qkv, v, "v_cache", p.kv_heads, p.dim);
  check(v, "v_cache").dtype_like(k, "k_cache");
  check(slot, "slots").shape({"T"}).dtype({ScalarType::Int}).contiguous();
  p.cache = k.scalar_type() == ScalarType::Float8_e4m3fn ? KvCache::kE4M3
            : k.scalar_type() == ScalarType::Char        ? KvCache::kS8
                                                         : KvCache::kLikeQkv;
  const bool byte = p.cache != KvCache::kLikeQkv;
  p.k_scale = check_scale(check, k_scale, "k_scale", p.kv_heads, byte, p.k_scale_step);
  p.v_scale = check_scale(check, v_scale, "v_scale", p.kv_heads, byte, p.v_scale_step);
  p.k_cache = k.data_ptr();
  p.v_cache = v.data_ptr();
  p.slots = static_cast<const int32_t*>(slot.data_ptr());
  p.k_page_stride = k.stride(0);
  p.v_page_stride = v.stride(0);
  p.page = static_cast<int>(k.size(1));
}

Tensor qk_norm_rope_append_cuda(const Tensor& qkv, int64_t heads, int64_t kv_heads, const OptionalTensor& cos_sin,
                                const OptionalTensor& rows, bool interleaved, const OptionalTensor& q_weight,
                                const OptionalTensor& k_weight, double eps, const OptionalTensor& k_cache, const OptionalTensor& v_cache,
                                const OptionalTensor& slots, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  Check check(kRope);
  check_rows(check, qkv, "qkv", {"T", "_"});
  check.require(heads >= 1, "heads", "is ", heads, ", expected >= 1");
  check.require(kv_heads >= 0, "kv_heads", "is ", kv_heads, ", expected >= 0");
  const int64_t width = qkv.size(1), total = heads + 2 * kv_heads, dim = width / total;
  check.require(width % total == 0, "qkv", ".size(1) is ", width, ", expected a multiple of heads + 2 * kv_heads = ", total);
  check.require(dim % 8 == 0 && dim <= 256, "qkv", "has head dimension ", dim, ", expected a multiple of 8, at most 256");
  check.require(width <= INT32_MAX, "qkv", ".size(1) is ", width, ", expected at most ", INT32_MAX);
  check.require(eps >= 0.0, "eps", "is ", eps, ", expected >= 0");
  QkNormRopeAppendParams p{};
  p.qkv = qkv.data_ptr();
  p.tokens = qkv.size(0);
  p.qkv_stride = qkv.stride(0);
  p.heads = static_cast<int>(heads);
  p.kv_heads = static_cast<int>(kv_heads);
  p.dim = static_cast<int>(dim);
  p.eps = static_cast<float>(eps);
  p.interleaved = interleaved;
  p.dtype = dtype_of(qkv);
  check_rope(check, p, cos_sin, rows);
  p.q_weight = check_weight(check, qkv, q_weight, "q_weight", dim, p.q_weight_fp32);
  p.k_weight = check_weight(check, qkv, k_weight, "k_weight", dim, p.k_weight_fp32);
  if (kv_heads == 0) {
    const std::pair<const OptionalTensor&, const char*> unused[] = {{k_cache, "k_cache"},   {v_cache, "v_cache"}, {slots, "slots"},
                                                                    {k_weight, "k_weight"}, {k_scale, "k_scale"}, {v_scale, "v_scale"}};
    for (const auto& [x, name] : unused) check_absent(check, x, name, "kv_heads is 0");
  } else {
    check_caches(check, p, qkv, k_cache, v_cache, slots, k_scale, v_scale);
  }
  Tensor q = new_tensor(qkv, {qkv.size(0), heads, dim}, qkv.scalar_type());
  if (p.tokens == 0) return q;
  p.q = q.data_ptr();
  const DeviceScope device(check);
  qk_norm_rope_append(p, stream_of(check));
  return q;
}

}  // namespace
}  // namespace pyllm

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) {
  m.impl("act", PYLLM_BOX(pyllm::act_cuda));
  m.impl("act_mul", PYLLM_BOX(pyllm::act_mul_cuda));
  m.impl("act_mul_fp8", PYLLM_BOX(pyllm::act_mul_fp8_cuda));
  m.impl("act_mul_fp8_static", PYLLM_BOX(pyllm::act_mul_fp8_static_cuda));
  m.impl("softcap", PYLLM_BOX(pyllm::softcap_cuda));
  m.impl("embed_tokens", PYLLM_BOX(pyllm::embed_tokens_cuda));
  m.impl("qk_norm_rope_append", PYLLM_BOX(pyllm::qk_norm_rope_append_cuda));
}
