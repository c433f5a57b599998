// Registers decode_attention and merge_states: checks, allocation, Params, launch. Schemas and CPU references: pyllm/ops/decode.py.
#include "attention/bind_checks.h"
#include "attention/decode_attention.h"
#include "attention/merge_states.h"

#include <algorithm>
#include <tuple>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;

// A word of bits per row: int32 for up to 32 new keys, int64 for 64.
void check_tree(Check& check, const OptionalTensor& mask, int64_t max_q) {
  if (!mask) return;
  check(*mask, "mask").shape({"T"}).dtype({kInt, kLong}).contiguous();
  const int64_t bits = mask->scalar_type() == kLong ? 64 : 32;
  check.require(max_q <= bits, "mask", "has ", bits, " bits a row, expected at least max_q=", max_q);
}

const int* ints(const Tensor& t) { return static_cast<const int*>(t.data_ptr()); }

std::tuple<Tensor, Tensor> decode_attention_cuda(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& page_table,
                                                 const Tensor& q_starts, const Tensor& kv_lens, double scale, int64_t window,
                                                 double softcap, const OptionalTensor& sinks, const OptionalTensor& k_scale,
                                                 const OptionalTensor& v_scale, int64_t max_q, const OptionalTensor& mask, bool invariant) {
  Check check("decode_attention");
  check(q, "q").shape({"T", "H", "D"}).dtype({kBF16, kFP16}).rows().aligned(8, 2);
  const int64_t tokens = check["T"], heads = check["H"], dim = check["D"];
  check.require(dim == 64 || dim == 96 || dim == 128 || dim == 192 || dim == 256, "q", ".size(2) is ", dim,
                ", expected 64, 96, 128, 192 or 256");
  check_cache(check, k_cache, "k_cache", q, true);
  check_cache(check, v_cache, "v_cache", q, true);
  check(v_cache, "v_cache").dtype_like(k_cache, "k_cache");
  const int64_t kv_heads = check["K"], page = check["P"];
  check_groups(check, "k_cache");
  check(page_table, "page_table").shape({"B", "W"}).dtype({kInt}).rows();
  check(kv_lens, "kv_lens").shape({"B"}).dtype({kInt}).contiguous();
  const int64_t batch = check["B"], width = check["W"];
  check(q_starts, "q_starts").shape({"_"}).dtype({kInt}).contiguous();
  check.require(q_starts.size(0) == batch + 1, "q_starts", ".size(0) is ", q_starts.size(0), ", expected B+1=", batch + 1);
  check_scores(check, window, softcap, sinks);
  check.require(max_q >= 1 && max_q <= 64, "max_q", "is ", max_q, ", expected 1 to 64");
  const int k_step = check_scale(check, k_scale, "k_scale"), v_step = check_scale(check, v_scale, "v_scale");
  check_tree(check, mask, max_q);
  check.require(tokens < int64_t{1} << 31, "q", ".size(0) is ", tokens, ", expected less than 2^31");

  Tensor out = new_tensor(q, {tokens, heads, dim}, q.scalar_type());
  Tensor lse = new_tensor(q, {tokens, heads}, kFP32);
  if (tokens == 0 || heads == 0) return {out, lse};
  DecodeAttentionParams p{.q = q.data_ptr(),
                          .q_token_stride = q.stride(0),
                          .q_head_stride = q.stride(1),
                          .k_cache = k_cache.data_ptr(),
                          .v_cache = v_cache.data_ptr(),
                          .k_page_stride = k_cache.stride(0),
                          .v_page_stride = v_cache.stride(0),
                          .page_table = ints(page_table),
                          .table_stride = page_table.stride(0),
                          .q_starts = ints(q_starts),
                          .kv_lens = ints(kv_lens),
                          .sinks = pointer<float>(sinks),
                          .k_scale = pointer<float>(k_scale),
                          .v_scale = pointer<float>(v_scale),
                          .k_scale_step = k_step,
                          .v_scale_step = v_step,
                          .mask = mask ? static_cast<const uint32_t*>(mask->data_ptr()) : nullptr,
                          .mask_stride = mask && mask->scalar_type() == kLong ? 2 : 1,
                          .mask_words = !mask                          ? 0
                                        : mask->scalar_type() == kLong ? 2
                                                                       : 1,
                          .out = out.data_ptr(),
                          .lse = static_cast<float*>(lse.data_ptr()),
                          .tokens = tokens,
                          .batch = static_cast<int>(batch),
                          .heads = static_cast<int>(heads),
                          .kv_heads = static_cast<int>(kv_heads),
                          .group = static_cast<int>(heads / kv_heads),
                          .dim = static_cast<int>(dim),
                          .max_q = static_cast<int>(max_q),
                          .usual_q = static_cast<int>(max_q),
                          .page_shift = std::countr_zero(static_cast<uint64_t>(page)),
                          .width = static_cast<int>(width),
                          .window = static_cast<int>(std::min<int64_t>(window, 1 << 30)),
                          .scale = static_cast<float>(scale),
                          .softcap = static_cast<float>(softcap),
                          .dtype = dtype_of(q),
                          .cache = k_cache.scalar_type() == kE4M3 ? DecodeCache::kE4M3
                                   : k_cache.scalar_type() == kS8 ? DecodeCache::kS8
                                                                  : DecodeCache::kLikeQ,
                          .invariant = invariant};
  const DeviceScope device(check);
  plan_decode_attention(p);
  const Tensor workspace = new_tensor(q, {p.workspace_bytes / 4}, kFP32);
  p.workspace = workspace.data_ptr();
  decode_attention(p, stream_of(check));
  return {out, lse};
}

std::tuple<Tensor, Tensor> merge_states_cuda(const Tensor& o_a, const Tensor& lse_a, const Tensor& o_b, const Tensor& lse_b) {
  Check check("merge_states");
  check(o_a, "o_a").shape({"T", "H", "D"}).dtype({kBF16, kFP16, kFP32}).rows().aligned(16, o_a.element_size());
  check(o_b, "o_b").shape({"T", "H", "D"}).dtype_like(o_a, "o_a").rows().aligned(16, o_b.element_size());
  check(lse_a, "lse_a").shape({"T", "H"}).dtype({kFP32}).contiguous();
  check(lse_b, "lse_b").shape({"T", "H"}).dtype({kFP32}).contiguous();
  const int64_t tokens = check["T"], heads = check["H"], dim = check["D"], bytes = dim * o_a.element_size();
  check.require(bytes % 16 == 0 && bytes <= 8192 && dim > 0, "o_a", ".size(2) is ", dim, ", expected a multiple of ",
                16 / o_a.element_size(), " up to ", 8192 / o_a.element_size());
  check.require(tokens * heads < int64_t{1} << 31, "o_a", "has T H = ", tokens * heads, " rows, expected less than 2^31");
  Tensor out = new_tensor(o_a, {tokens, heads, dim}, o_a.scalar_type());
  Tensor lse = new_tensor(o_a, {tokens, heads}, kFP32);
  if (tokens == 0 || heads == 0) return {out, lse};
  const MergeStatesParams p{.o = {o_a.data_ptr(), o_b.data_ptr()},
                            .token_stride = {o_a.stride(0), o_b.stride(0)},
                            .head_stride = {o_a.stride(1), o_b.stride(1)},
                            .lse = {static_cast<const float*>(lse_a.data_ptr()), static_cast<const float*>(lse_b.data_ptr())},
                            .out = out.data_ptr(),
                            .out_lse = static_cast<float*>(lse.data_ptr()),
                            .tokens = tokens,
                            .heads = static_cast<int>(heads),
                            .dim = static_cast<int>(dim),
                            .dtype = dtype_of(o_a)};
  const DeviceScope device(check);
  merge_states(p, stream_of(check));
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) {
  m.impl("decode_attention", PYLLM_BOX(decode_attention_cuda));
  m.impl("merge_states", PYLLM_BOX(merge_states_cuda));
}

}  // namespace pyllm
