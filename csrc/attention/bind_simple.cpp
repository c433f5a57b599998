// Registers simple_attention: checks, allocation, Params, launch. Schema and CPU reference: pyllm/ops/simple.py.
#include "attention/simple_attention.h"
#include "common/bind.h"
#include "common/device.h"

#include <algorithm>
#include <bit>
#include <tuple>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;
constexpr auto kBF16 = ScalarType::BFloat16, kFP16 = ScalarType::Half, kFP32 = ScalarType::Float, kE4M3 = ScalarType::Float8_e4m3fn,
               kInt = ScalarType::Int;

const int* ints(const OptionalTensor& t) { return t ? static_cast<const int*>(t->data_ptr()) : nullptr; }

void check_keys(Check& check, const Tensor& t, const char* name, const Tensor& q, bool paged) {
  if (paged) {
    check(t, name).shape({"pages", "P", "K", "D"});
    check.require(check["P"] > 0 && std::has_single_bit(static_cast<uint64_t>(check["P"])), name, ".size(1) is ", check["P"],
                  ", expected a power of two");
  } else {
    check(t, name).shape({"S", "K", "D"});
  }
  check.require(t.scalar_type() == q.scalar_type() || t.scalar_type() == kE4M3, name, "is ", name_of(t.scalar_type()), ", expected ",
                name_of(q.scalar_type()), " like q or float8_e4m3fn");
  check(t, name).rows().aligned(16, t.element_size());
}

// [1] or [K] fp32; its step per KV head.
int check_scale(Check& check, const OptionalTensor& scale, const char* name) {
  if (!scale) return 0;
  check(*scale, name).dtype({kFP32}).contiguous();
  const int64_t size = scale->dim() == 1 ? scale->size(0) : -1;
  check.require(size == 1 || size == check["K"], name, "has ", scale->numel(), " elements in ", scale->dim(),
                " dimensions, expected [1] or [K=", check["K"], "]");
  return size == 1 ? 0 : 1;
}

const float* floats(const OptionalTensor& t) { return t ? static_cast<const float*>(t->data_ptr()) : nullptr; }

void check_indices(Check& check, const Tensor& q_starts, const OptionalTensor& kv_starts, const OptionalTensor& kv_lens,
                   const OptionalTensor& page_table) {
  check(q_starts, "q_starts").shape({"B+1"}).dtype({kInt}).contiguous();
  const int64_t batch = check["B+1"] - 1;
  check.require(batch >= 0, "q_starts", ".size(0) is 0, expected B+1");
  check.require(page_table.has_value() == kv_lens.has_value(), "kv_lens", "is ", kv_lens ? "given" : "missing",
                ", expected it with a page_table and only then");
  check.require(page_table.has_value() != kv_starts.has_value(), "kv_starts", "is ", kv_starts ? "given" : "missing",
                ", expected it exactly without a page_table");
  if (kv_starts) check(*kv_starts, "kv_starts").shape({"B+1"}).dtype({kInt}).contiguous();
  if (!page_table) return;
  check(*page_table, "page_table").shape({"B", "W"}).dtype({kInt}).rows();
  check(*kv_lens, "kv_lens").shape({"B"}).dtype({kInt}).contiguous();
  check.require(check["B"] == batch, "page_table", ".size(0) is ", check["B"], ", expected B=", batch, " (from q_starts)");
}

void check_mask(Check& check, const OptionalTensor& mask, const OptionalTensor& mask_starts) {
  check.require(mask.has_value() || !mask_starts.has_value(), "mask_starts", "is given, expected it only with a mask");
  if (mask) check(*mask, "mask").shape({"T", "words"}).dtype({kInt}).rows();
  if (!mask_starts) return;
  check(*mask_starts, "mask_starts").shape({"_"}).dtype({kInt}).contiguous();
  check.require(mask_starts->size(0) == check["B+1"] - 1, "mask_starts", ".size(0) is ", mask_starts->size(0),
                ", expected B=", check["B+1"] - 1, " (from q_starts)");
}

void fill_strides(SimpleAttentionParams& p, const Tensor& q, const Tensor& k, const Tensor& v, bool paged) {
  p.q_token_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  const int64_t token = paged ? 1 : 0;  // the dimension of tokens
  p.k_token_stride = k.stride(token);
  p.k_head_stride = k.stride(token + 1);
  p.v_token_stride = v.stride(token);
  p.v_head_stride = v.stride(token + 1);
  if (!paged) return;
  p.k_page_stride = k.stride(0);
  p.v_page_stride = v.stride(0);
  p.page_shift = std::countr_zero(static_cast<uint64_t>(k.size(1)));
}

std::tuple<Tensor, Tensor> simple_attention_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_starts,
                                                 const OptionalTensor& kv_starts, const OptionalTensor& kv_lens,
                                                 const OptionalTensor& page_table, double scale, bool causal, int64_t window,
                                                 double softcap, const OptionalTensor& sinks, const OptionalTensor& mask,
                                                 const OptionalTensor& mask_starts, const OptionalTensor& k_scale,
                                                 const OptionalTensor& v_scale, int64_t max_q) {
  Check check("simple_attention");
  const bool paged = page_table.has_value();
  check(q, "q").shape({"T", "H", "D"}).dtype({kBF16, kFP16}).rows().aligned(16, 2);
  const int64_t tokens = check["T"], heads = check["H"], dim = check["D"];
  check.require(dim == 64 || dim == 96 || dim == 128 || dim == 256, "q", ".size(2) is ", dim, ", expected 64, 96, 128 or 256");
  check_keys(check, k, "k", q, paged);
  check_keys(check, v, "v", q, paged);
  check(v, "v").dtype_like(k, "k");
  const int64_t kv_heads = check["K"];
  check.require(kv_heads > 0 && heads % kv_heads == 0, "q", "has H=", heads, " heads, expected a multiple of K=", kv_heads, " (from k)");
  check_indices(check, q_starts, kv_starts, kv_lens, page_table);
  check_mask(check, mask, mask_starts);
  if (sinks) check(*sinks, "sinks").shape({"H"}).dtype({kFP32}).contiguous();
  check.require(window >= 0, "window", "is ", window, ", expected >= 1 (or None)");
  check.require(softcap >= 0 && softcap < __builtin_inf(), "softcap", "is ", softcap, ", expected finite and > 0 (or None)");
  check.require(max_q >= 0, "max_q", "is ", max_q, ", expected >= 1 (or None)");
  const int64_t group = heads / kv_heads;
  check.require(tokens * group < int64_t{1} << 31, "q", "has ", tokens, " rows in groups of ", group, ", expected less than 2^31 together");

  Tensor out = new_tensor(q, {tokens, heads, dim}, q.scalar_type());
  Tensor lse = new_tensor(q, {tokens, heads}, kFP32);
  if (tokens == 0 || heads == 0) return {out, lse};
  const DeviceScope device(check);
  check.require(device_architecture() >= 80, "device", "is sm_", device_architecture(), ", expected sm_80 or later");
  SimpleAttentionParams p{};
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  fill_strides(p, q, k, v, paged);
  p.q_starts = ints(q_starts);
  p.kv_starts = ints(kv_starts);
  p.kv_lens = ints(kv_lens);
  p.page_table = ints(page_table);
  p.table_stride = paged ? page_table->stride(0) : 0;
  p.sinks = floats(sinks);
  p.k_scale_step = check_scale(check, k_scale, "k_scale");
  p.v_scale_step = check_scale(check, v_scale, "v_scale");
  p.k_scale = floats(k_scale);
  p.v_scale = floats(v_scale);
  p.mask = mask ? static_cast<const uint32_t*>(mask->data_ptr()) : nullptr;
  p.mask_stride = mask ? mask->stride(0) : 0;
  p.mask_words = mask ? static_cast<int>(mask->size(1)) : 0;
  p.mask_starts = ints(mask_starts);
  p.out = out.data_ptr();
  p.lse = static_cast<float*>(lse.data_ptr());
  p.tokens = tokens;
  p.batch = static_cast<int>(check["B+1"] - 1);
  p.heads = static_cast<int>(heads);
  p.kv_heads = static_cast<int>(kv_heads);
  p.group = static_cast<int>(group);
  p.window = static_cast<int>(std::min<int64_t>(window, 1 << 30));
  p.causal = causal ? 1 : 0;
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  const SimpleAttentionPlan plan = plan_simple_attention(p, max_q, paged ? page_table->size(1) * k.size(1) : k.size(0));
  p.splits = plan.splits;
  Tensor partial = new_tensor(q, {plan.splits > 1 ? plan.splits : 0, tokens * heads, dim + 1}, kFP32);
  if (plan.splits > 1) {
    p.partial = static_cast<float*>(partial.data_ptr());
    p.partial_lse = p.partial + plan.splits * tokens * heads * dim;
  }
  simple_attention(p, plan, static_cast<int>(dim), dtype_of(q), k.scalar_type() == kE4M3, stream_of(check));
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) { m.impl("simple_attention", PYLLM_BOX(simple_attention_cuda)); }

}  // namespace pyllm
