// Registers simple_attention: checks, allocation, Params, launch. Schema and CPU reference: pyllm/ops/simple.py.
#include "attention/bind_checks.h"
#include "attention/simple_attention.h"
#include "common/device.h"

#include <algorithm>
#include <bit>
#include <tuple>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;

void check_keys(Check& check, const Tensor& t, const char* name, const Tensor& q, bool paged) {
  if (paged) {
    check(t, name).shape({"pages", "P", "K", "D"});
    check_page(check, name, 1);
  } else {
    check(t, name).shape({"S", "K", "D"});
  }
  check.require(t.scalar_type() == q.scalar_type() || t.scalar_type() == kE4M3, name, "is ", name_of(t.scalar_type()), ", expected ",
                name_of(q.scalar_type()), " like q or float8_e4m3fn");
  check(t, name).rows().aligned(16, t.element_size());
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
  check_groups(check, "k");
  check_indices(check, q_starts, kv_starts, kv_lens, page_table);
  check_mask(check, mask, mask_starts);
  check_scores(check, window, softcap, sinks);
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
  p.q_starts = pointer<int>(q_starts);
  p.kv_starts = pointer<int>(kv_starts);
  p.kv_lens = pointer<int>(kv_lens);
  p.page_table = pointer<int>(page_table);
  p.table_stride = paged ? page_table->stride(0) : 0;
  p.sinks = pointer<float>(sinks);
  p.k_scale_step = check_scale(check, k_scale, "k_scale");
  p.v_scale_step = check_scale(check, v_scale, "v_scale");
  p.k_scale = pointer<float>(k_scale);
  p.v_scale = pointer<float>(v_scale);
  p.mask = mask ? static_cast<const uint32_t*>(mask->data_ptr()) : nullptr;
  p.mask_stride = mask ? mask->stride(0) : 0;
  p.mask_words = mask ? static_cast<int>(mask->size(1)) : 0;
  p.mask_starts = pointer<int>(mask_starts);
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
