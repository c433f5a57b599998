// Registers the CUDA kernel of csrc/step: checks, allocation, Params, launch. Schema and CPU reference: pyllm/ops/step.py.
#include "common/bind.h"
#include "step/decode_step.h"

#include <memory>
#include <vector>

namespace pyllm {

using TensorList = std::vector<Tensor>;
template <>
inline constexpr bool kBoxable<TensorList> = true;

namespace {

constexpr int kMatrixAlign = 128;                                     // bytes: weights are read in lines of so many
constexpr int64_t kMostD = 8192, kMostFfn = 32768, kMostPairs = 256;  // rows times KV heads

struct Sizes {
  int64_t rows, layers, d, heads, kv_heads, head_dim, ffn, vocab;
  int64_t qkv() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t q() const { return heads * head_dim; }
};

class StepCheck {
 public:
  StepCheck(Check& check, StepParams& params) : check_(check), p(params) {}

  // One vector of int32 for each row.
  const int32_t* index(const Tensor& t, const char* name) {
    check_(t, name).shape({"M"}).dtype({ScalarType::Int}).contiguous();
    return static_cast<const int32_t*>(t.data_ptr());
  }

  void count(const TensorList& list, const char* name) const {
    const int64_t got = static_cast<int64_t>(list.size());
    check_.require(got == s.layers, name, "has ", got, " tensors, expected ", s.layers, ", one for each layer");
  }
  // All layers or none; whether there are any.
  bool given(const TensorList& list, const char* name) const {
    if (list.empty()) return false;
    count(list, name);
    return true;
  }

  const void* tensor(const Tensor& t, const char* name, std::initializer_list<int64_t> sizes, ScalarType dtype) {
    const int align = sizes.size() > 1 ? kMatrixAlign : 16;
    check_(t, name).dtype({dtype});
    check_.require(t.dim() == static_cast<int64_t>(sizes.size()), name, "has ", t.dim(), " dimensions, expected ", sizes.size());
    int64_t i = 0;
    for (const int64_t size : sizes) {
      check_.require(t.size(i) == size, name, ".size(", i, ") is ", t.size(i), ", expected ", size);
      ++i;
    }
    check_(t, name).contiguous();
    check_.require(reinterpret_cast<uintptr_t>(t.data_ptr()) % align == 0, name, "starts at an address that is not a multiple of ", align,
                   " bytes");
    return t.data_ptr();
  }

  void numbers(int64_t heads, int64_t kv_heads, int64_t head_dim, double eps, int64_t act) {
    check_.require(head_dim == 64 || head_dim == 128, "head_dim", "is ", head_dim, ", expected 64 or 128");
    check_.require(kv_heads >= 1 && kv_heads <= 256, "kv_heads", "is ", kv_heads, ", expected 1 to 256");
    check_.require(heads >= 1 && heads % kv_heads == 0 && heads / kv_heads <= 8, "heads", "is ", heads,
                   ", expected 1 to 8 for each of the ", kv_heads, " KV heads");
    check_.require(eps >= 0.0, "eps", "is ", eps, ", expected >= 0");
    check_.require(act >= 0 && act <= 3, "act", "is ", act, ", expected 0 to 3 (silu, gelu, gelu_tanh, relu2)");
  }

  // The product `which` of all layers, its scales where the weights are e4m3.
  void weights(int which, const TensorList& list, const TensorList& scales, const char* name, const char* scale_name, int64_t n,
               int64_t k) {
    count(list, name);
    check_.require(scales.empty() != p.fp8_weights, scale_name, scales.empty() ? "is empty" : "is given", ", expected ",
                   p.fp8_weights ? "one tensor for each layer of e4m3 weights" : "none for bf16 weights");
    if (p.fp8_weights) count(scales, scale_name);
    const ScalarType dtype = p.fp8_weights ? ScalarType::Float8_e4m3fn : ScalarType::BFloat16;
    for (int64_t i = 0; i < s.layers; ++i) {
      p.layer[i].weight[which] = tensor(list[i], name, {n, k}, dtype);
      if (p.fp8_weights) p.layer[i].weight_scale[which] = static_cast<const float*>(tensor(scales[i], scale_name, {n}, ScalarType::Float));
    }
  }

  const float* floats(const Tensor& t, const char* name, int64_t n) {
    return static_cast<const float*>(tensor(t, name, {n}, ScalarType::Float));
  }

  void caches(const TensorList& k, const TensorList& v, const TensorList& k_scale, const TensorList& v_scale) {
    count(k, "k_caches"), count(v, "v_caches");
    check_(k[0], "k_caches").dtype({ScalarType::BFloat16, ScalarType::Float8_e4m3fn});
    p.fp8_cache = k[0].scalar_type() == ScalarType::Float8_e4m3fn;
    check_.require(k[0].dim() == 4, "k_caches", "has ", k[0].dim(), " dimensions, expected 4");
    const int64_t page = k[0].size(1);
    check_.require(page >= 16 && page % 16 == 0 && page < 65536, "k_caches", ".size(1) is ", page, ", expected a page of a multiple of 16");
    p.page = static_cast<int>(page);
    p.page_stride = k[0].stride(0);
    for (int64_t i = 0; i < s.layers; ++i) {
      p.layer[i].k_cache = cache(k[i], "k_caches", k[0]);
      p.layer[i].v_cache = cache(v[i], "v_caches", k[0]);
    }
    p.k_scale_step = scales(k_scale, "k_scale", &StepLayer::k_scale);
    p.v_scale_step = scales(v_scale, "v_scale", &StepLayer::v_scale);
  }

  Sizes s{};

 private:
  void* cache(const Tensor& t, const char* name, const Tensor& like) {
    check_(t, name).dtype_like(like, "k_caches").aligned(16, t.element_size());
    check_.require(t.dim() == 4 && t.size(1) == p.page && t.size(2) == s.kv_heads && t.size(3) == s.head_dim, name,
                   "is not [pages, P, K, D] with P=", p.page, ", K=", s.kv_heads, ", D=", s.head_dim);
    check_.require(t.size(0) == like.size(0), name, "has ", t.size(0), " pages, expected ", like.size(0), " as in the first of k_caches");
    check_.require(t.stride(3) == 1 && t.stride(2) == s.head_dim && t.stride(1) == s.kv_heads * s.head_dim, name,
                   "has pages that are not contiguous");
    check_.require(t.stride(0) == p.page_stride || t.size(0) <= 1, name, ".stride(0) is ", t.stride(0), ", expected ", p.page_stride,
                   " as in the first of k_caches");
    return t.data_ptr();
  }

  // Elements between the scales of two heads.
  int scales(const TensorList& list, const char* name, const float* StepLayer::* member) {
    check_.require(p.fp8_cache || list.empty(), name, "is given, expected none for a bf16 cache");
    if (!given(list, name)) return 0;
    const int64_t n = list[0].dim() == 1 ? list[0].size(0) : -1;
    check_.require(n == 1 || n == s.kv_heads, name, "has the wrong shape, expected [1] or [", s.kv_heads, "]");
    for (int64_t i = 0; i < s.layers; ++i) {
      check_(list[i], name).dtype({ScalarType::Float}).contiguous();
      check_.require(list[i].dim() == 1 && list[i].size(0) == n, name, "has layers of different sizes");
      p.layer[i].*member = static_cast<const float*>(list[i].data_ptr());
    }
    return n == 1 ? 0 : 1;
  }

  Check& check_;
  StepParams& p;
};

void check_sizes(Check& check, const Sizes& s, bool fp8_weights) {
  check.require(s.rows >= 1 && s.rows <= kStepRows, "ids", ".size(0) is ", s.rows, ", expected 1 to ", kStepRows);
  check.require(s.layers >= 1 && s.layers <= kStepLayers, "qkv", "has ", s.layers, " tensors, expected 1 to ", kStepLayers);
  check.require(s.d % 64 == 0 && s.d >= 64 && s.d <= kMostD, "embed", ".size(1) is ", s.d, ", expected a multiple of 64 up to ", kMostD);
  check.require(s.vocab % 8 == 0 && s.vocab >= 8 && s.vocab <= int64_t{1} << 24, "embed", ".size(0) is ", s.vocab,
                ", expected a multiple of 8");
  check.require(s.ffn % 64 == 0 && s.ffn >= 64 && s.ffn <= kMostFfn, "down", ".size(1) is ", s.ffn, ", expected a multiple of 64 up to ",
                kMostFfn);
  check.require(s.rows * s.kv_heads <= kMostPairs, "kv_heads", "is ", s.kv_heads, ", expected at most ", kMostPairs / s.rows, " with ",
                s.rows, " rows");
  check.require(decode_step_fits(s.rows, s.d, s.heads, s.kv_heads, s.head_dim, s.ffn, fp8_weights), "ids", ".size(0) is ", s.rows,
                ", expected fewer rows: those of x leave no room for a ring of weights in shared memory");
}

Tensor decode_step_cuda(const Tensor& ids, const Tensor& slots, const Tensor& kv_lens, const Tensor& page_table, const Tensor& cos_sin,
                        const Tensor& rope_rows, const Tensor& embed, TensorList attn_norm, TensorList qkv, TensorList o,
                        TensorList mlp_norm, TensorList up, TensorList down, const Tensor& norm, const Tensor& head, TensorList k_caches,
                        TensorList v_caches, const Tensor& workspace, int64_t heads, int64_t kv_heads, int64_t head_dim, double eps,
                        int64_t act, double softmax_scale, TensorList qkv_scale, TensorList o_scale, TensorList up_scale,
                        TensorList down_scale, TensorList qkv_bias, TensorList q_norm, TensorList k_norm, TensorList k_scale,
                        TensorList v_scale) {
  Check check("decode_step");
  const auto params = std::make_unique<StepParams>();
  StepParams& p = *params;
  StepCheck c(check, p);
  Sizes& s = c.s;
  p.ids = c.index(ids, "ids"), p.slots = c.index(slots, "slots"), p.kv_lens = c.index(kv_lens, "kv_lens");
  p.rope_rows = c.index(rope_rows, "rope_rows");
  check(page_table, "page_table").shape({"M", "W"}).dtype({ScalarType::Int}).rows();
  p.page_table = static_cast<const int32_t*>(page_table.data_ptr());
  c.numbers(heads, kv_heads, head_dim, eps, act);
  check(cos_sin, "cos_sin").shape({"L", "R"}).dtype({ScalarType::Float}).contiguous();
  check.require(check["R"] % 2 == 0 && check["R"] >= 2 && check["R"] <= head_dim, "cos_sin", ".size(1) is ", check["R"],
                ", expected an even number from 2 to ", head_dim);
  check(embed, "embed").shape({"V", "d"});
  check.require(!qkv.empty(), "qkv", "is empty, expected one tensor for each layer");
  check.require(!down.empty() && down[0].dim() == 2, "down", "is no list of matrices");
  s = {check["M"], static_cast<int64_t>(qkv.size()), check["d"], heads, kv_heads, head_dim, down[0].size(1), check["V"]};
  check(qkv[0], "qkv").dtype({ScalarType::BFloat16, ScalarType::Float8_e4m3fn});
  p.fp8_weights = qkv[0].scalar_type() == ScalarType::Float8_e4m3fn;
  check_sizes(check, s, p.fp8_weights);
  p.embed = c.tensor(embed, "embed", {s.vocab, s.d}, ScalarType::BFloat16);
  p.head = c.tensor(head, "head", {s.vocab, s.d}, ScalarType::BFloat16);
  p.norm = c.floats(norm, "norm", s.d);
  c.weights(kStepQkv, qkv, qkv_scale, "qkv", "qkv_scale", s.qkv(), s.d);
  c.weights(kStepO, o, o_scale, "o", "o_scale", s.d, s.q());
  c.weights(kStepUp, up, up_scale, "up", "up_scale", 2 * s.ffn, s.d);
  c.weights(kStepDown, down, down_scale, "down", "down_scale", s.d, s.ffn);
  c.count(attn_norm, "attn_norm"), c.count(mlp_norm, "mlp_norm");
  const bool bias = c.given(qkv_bias, "qkv_bias"), q_normed = c.given(q_norm, "q_norm"), k_normed = c.given(k_norm, "k_norm");
  for (int64_t i = 0; i < s.layers; ++i) {
    p.layer[i].norm[0] = c.floats(attn_norm[i], "attn_norm", s.d), p.layer[i].norm[1] = c.floats(mlp_norm[i], "mlp_norm", s.d);
    if (bias) p.layer[i].qkv_bias = c.tensor(qkv_bias[i], "qkv_bias", {s.qkv()}, ScalarType::BFloat16);
    if (q_normed) p.layer[i].q_norm = c.floats(q_norm[i], "q_norm", head_dim);
    if (k_normed) p.layer[i].k_norm = c.floats(k_norm[i], "k_norm", head_dim);
  }
  c.caches(k_caches, v_caches, k_scale, v_scale);

  check(workspace, "workspace").shape({"bytes"}).dtype({ScalarType::Byte}).contiguous();
  const int64_t bytes = decode_step_workspace(s.rows, s.layers, s.d, heads, kv_heads, head_dim, s.ffn);
  check.require(check["bytes"] >= bytes, "workspace", ".size(0) is ", check["bytes"], ", expected at least ", bytes);
  check.require(reinterpret_cast<uintptr_t>(workspace.data_ptr()) % 256 == 0, "workspace",
                "starts at an address that is not a multiple of 256 bytes");
  Tensor logits = new_tensor(embed, {s.rows, s.vocab}, ScalarType::BFloat16);
  p.workspace = workspace.data_ptr(), p.logits = logits.data_ptr(), p.cos_sin = static_cast<const float*>(cos_sin.data_ptr());
  p.rows = static_cast<int>(s.rows), p.layers = static_cast<int>(s.layers), p.d = static_cast<int>(s.d);
  p.heads = static_cast<int>(heads), p.kv_heads = static_cast<int>(kv_heads), p.head_dim = static_cast<int>(head_dim);
  p.ffn = static_cast<int>(s.ffn), p.vocab = static_cast<int>(s.vocab), p.act = static_cast<int>(act);
  p.table_stride = static_cast<int>(page_table.stride(0)), p.rotary = static_cast<int>(check["R"]);
  p.eps = static_cast<float>(eps), p.softmax_scale = static_cast<float>(softmax_scale);
  const DeviceScope device(check);
  decode_step(p, check["bytes"], stream_of(check));
  return logits;
}

}  // namespace
}  // namespace pyllm

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) { m.impl("decode_step", PYLLM_BOX(pyllm::decode_step_cuda)); }
