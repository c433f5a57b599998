// Registers prefill_attention and paged_attention. Schemas and CPU references: pyllm/ops/prefill.py, pyllm/ops/attention.py.
#include "attention/bind_checks.h"
#include "attention/paged_attention.h"

#include <algorithm>
#include <bit>
#include <tuple>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;

void check_keys(Check& check, const Tensor& t, const char* name, const char* width, const Tensor& q, bool paged) {
  if (paged) {
    check(t, name).shape({"pages", "P", "K", width});
    check_page(check, name, 16);
  } else {
    check(t, name).shape({"S", "K", width});
  }
  check(t, name).dtype_like(q, "q").rows().aligned(16, t.element_size());
}

// [1], [K] or [B, K] fp32: its steps per sequence and per KV head.
void scale_steps(Check& check, const OptionalTensor& scale, const char* name, int& batch_step, int& head_step) {
  batch_step = head_step = 0;
  if (!scale) return;
  check(*scale, name).dtype({kFP32}).contiguous();
  const int64_t batch = check["B+1"] - 1, heads = check["K"];
  const bool one = scale->dim() == 1 && scale->size(0) == 1, head = scale->dim() == 1 && scale->size(0) == heads;
  const bool each = scale->dim() == 2 && scale->size(0) == batch && scale->size(1) == heads;
  check.require(one || head || each, name, "has ", scale->numel(), " elements in ", scale->dim(), " dimensions, expected [1], [K=", heads,
                "] or [B=", batch, ", K=", heads, "]");
  if (!one) head_step = 1;
  if (each) batch_step = static_cast<int>(heads);
}

void fill_q_scale(Check& check, PrefillAttentionParams& p, const OptionalTensor& q_scale) {
  if (!q_scale) return;
  check(*q_scale, "q_scale").dtype({kFP32});
  if (q_scale->dim() != 1) {
    check(*q_scale, "q_scale").shape({"T", "H"});
    p.q_scale_token_step = q_scale->stride(0);
    p.q_scale_head_step = q_scale->stride(1);
  } else {
    check.require(q_scale->size(0) == 1, "q_scale", "has ", q_scale->size(0), " elements, expected [1] or [T, H]");
  }
  p.q_scale = pointer<float>(q_scale);
}

void fill_scales(PrefillAttentionParams& p, Check& check, const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  scale_steps(check, k_scale, "k_scale", p.k_scale_batch_step, p.k_scale_head_step);
  scale_steps(check, v_scale, "v_scale", p.v_scale_batch_step, p.v_scale_head_step);
  p.k_scale = pointer<float>(k_scale);
  p.v_scale = pointer<float>(v_scale);
}

void check_numbers(Check& check, int64_t tokens, double scale, int64_t window, double softcap, const OptionalTensor& sinks) {
  check_scores(check, window, softcap, sinks);
  check.require(scale > 0 && scale < __builtin_inf(), "scale", "is ", scale, ", expected finite and > 0");
  check.require(tokens < int64_t{1} << 31, "q", ".size(0) is ", tokens, ", expected less than 2^31");
}

// What both ops have; checked before.
void fill(PrefillAttentionParams& p, Check& check, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_starts,
          const OptionalTensor& kv_starts, const OptionalTensor& kv_lens, const OptionalTensor& page_table, double scale, bool causal,
          int64_t window, double softcap, const OptionalTensor& sinks, const Tensor& out, const Tensor& lse) {
  p.q = q.data_ptr();
  p.k = k.data_ptr();
  p.v = v.data_ptr();
  p.q_token_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  const int64_t token = page_table ? 1 : 0;  // the dimension of tokens
  p.k_token_stride = k.stride(token);
  p.k_head_stride = k.stride(token + 1);
  p.v_token_stride = v.stride(token);
  p.v_head_stride = v.stride(token + 1);
  p.k_page_stride = page_table ? k.stride(0) : 0;
  p.v_page_stride = page_table ? v.stride(0) : 0;
  p.page_shift = page_table ? std::countr_zero(static_cast<uint64_t>(k.size(1))) : 0;
  p.key_rows = k.size(0);
  p.q_starts = static_cast<const int*>(q_starts.data_ptr());
  p.kv_starts = pointer<int>(kv_starts);
  p.kv_lens = pointer<int>(kv_lens);
  p.page_table = pointer<int>(page_table);
  p.table_stride = page_table ? page_table->stride(0) : 0;
  p.sinks = pointer<float>(sinks);
  p.out = out.data_ptr();
  p.lse = static_cast<float*>(lse.data_ptr());
  p.tokens = q.size(0);
  p.batch = static_cast<int>(check["B+1"] - 1);
  p.heads = static_cast<int>(q.size(1));
  p.kv_heads = static_cast<int>(check["K"]);
  p.group = p.heads / p.kv_heads;
  p.dim = static_cast<int>(q.size(2));
  p.v_dim = static_cast<int>(out.size(2));
  p.window = static_cast<int>(std::min<int64_t>(window, 1 << 30));
  p.causal = causal;
  p.scale = static_cast<float>(scale);
  p.softcap = static_cast<float>(softcap);
  p.dtype = p.out_dtype = dtype_of(q);
}

std::tuple<Tensor, Tensor> prefill_attention_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& q_starts,
                                                  const OptionalTensor& kv_starts, const OptionalTensor& kv_lens,
                                                  const OptionalTensor& page_table, double scale, bool causal, int64_t window,
                                                  double softcap, const OptionalTensor& sinks, const OptionalTensor& mask,
                                                  const OptionalTensor& mask_starts, const OptionalTensor& q_scale,
                                                  const OptionalTensor& k_scale, const OptionalTensor& v_scale) {
  Check check("prefill_attention");
  const bool paged = page_table.has_value(), fp8 = q.scalar_type() == kE4M3;
  check(q, "q").shape({"T", "H", "D"}).dtype({kBF16, kFP16, kE4M3}).rows().aligned(16, q.element_size());
  const int64_t tokens = check["T"], heads = check["H"];
  check_keys(check, k, "k", "D", q, paged);
  check_keys(check, v, "v", "Dv", q, paged);
  const int64_t dim = check["D"], v_dim = check["Dv"];
  const bool same = dim == v_dim && (dim == 64 || dim == 128 || dim == 256 || (!fp8 && (dim == 96 || dim == 192)));
  check.require(same || (!fp8 && dim == 192 && v_dim == 128), "q", "has (D, Dv) (", dim, ", ", v_dim, "), expected ",
                fp8 ? "D = Dv of 64, 128, 256" : "D = Dv of 64, 96, 128, 192, 256, or (192, 128)");
  check_groups(check, "k");
  check_indices(check, q_starts, kv_starts, kv_lens, page_table);
  check_mask(check, mask, mask_starts);
  check_numbers(check, tokens, scale, window, softcap, sinks);
  check.require(fp8 || (!q_scale && !k_scale && !v_scale), "q_scale", "or k_scale or v_scale is given, expected with float8_e4m3fn only");

  Tensor out = new_tensor(q, {tokens, heads, v_dim}, fp8 ? kBF16 : q.scalar_type());
  Tensor lse = new_tensor(q, {tokens, heads}, kFP32);
  if (tokens == 0 || heads == 0) return {out, lse};
  Tensor schedule = new_tensor(q, {2}, kLong);
  PrefillAttentionParams p{};
  fill(p, check, q, k, v, q_starts, kv_starts, kv_lens, page_table, scale, causal, window, softcap, sinks, out, lse);
  p.mask = pointer<uint32_t>(mask);
  p.mask_stride = mask ? mask->stride(0) : 0;
  p.mask_words = mask ? static_cast<int>(mask->size(1)) : 0;
  p.mask_starts = pointer<int>(mask_starts);
  fill_q_scale(check, p, q_scale);
  fill_scales(p, check, k_scale, v_scale);
  p.out_dtype = fp8 ? DType::kBF16 : p.dtype;
  p.schedule = static_cast<unsigned long long*>(schedule.data_ptr());
  const DeviceScope device(check);
  prefill_attention(p, stream_of(check));
  return {out, lse};
}

constexpr int kDecodeRows = 8;  // of a sequence, up to which it is a decode

void fill_decode(PagedAttentionParams& p, const Tensor& q, bool fp8) {
  const PrefillAttentionParams& f = p.prefill;
  p.decode = DecodeAttentionParams{.q = q.data_ptr(),
                                   .q_token_stride = q.stride(0),
                                   .q_head_stride = q.stride(1),
                                   .k_cache = f.k,
                                   .v_cache = f.v,
                                   .k_page_stride = f.k_page_stride,
                                   .v_page_stride = f.v_page_stride,
                                   .page_table = f.page_table,
                                   .table_stride = f.table_stride,
                                   .q_starts = f.q_starts,
                                   .kv_lens = f.kv_lens,
                                   .sinks = f.sinks,
                                   .k_scale = f.k_scale,
                                   .v_scale = f.v_scale,
                                   .k_scale_step = f.k_scale_head_step,
                                   .v_scale_step = f.v_scale_head_step,
                                   .out = f.out,
                                   .lse = f.lse,
                                   .tokens = f.tokens,
                                   .batch = f.batch,
                                   .heads = f.heads,
                                   .kv_heads = f.kv_heads,
                                   .group = f.group,
                                   .dim = f.dim,
                                   .max_q = kDecodeRows,
                                   .usual_q = 1,  // the tokens of running sequences; longer ones cost a chunk more
                                   .page_shift = f.page_shift,
                                   .window = f.window,
                                   .scale = f.scale,
                                   .softcap = f.softcap,
                                   .dtype = p.q_dtype,
                                   .cache = fp8 ? DecodeCache::kE4M3 : DecodeCache::kLikeQ,
                                   .leave_padding = true};
}

std::tuple<Tensor, Tensor> paged_attention_cuda(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& page_table,
                                                const Tensor& q_starts, const Tensor& kv_lens, double scale, bool causal, int64_t window,
                                                double softcap, const OptionalTensor& sinks, const OptionalTensor& k_scale,
                                                const OptionalTensor& v_scale) {
  Check check("paged_attention");
  check(q, "q").shape({"T", "H", "D"}).dtype({kBF16, kFP16}).rows().aligned(16, 2);
  const int64_t tokens = check["T"], heads = check["H"], dim = check["D"];
  check_cache(check, k_cache, "k_cache", q, false);
  check_cache(check, v_cache, "v_cache", q, false);
  check(v_cache, "v_cache").dtype_like(k_cache, "k_cache");
  const bool fp8 = k_cache.scalar_type() == kE4M3;
  check.require(dim == 64 || dim == 128 || dim == 256 || (!fp8 && (dim == 96 || dim == 192)), "q", ".size(2) is ", dim, ", expected ",
                fp8 ? "64, 128 or 256 with a float8_e4m3fn cache" : "64, 96, 128, 192 or 256");
  check.require(!fp8 || q.scalar_type() == kBF16, "q", "is ", name_of(q.scalar_type()), ", expected bfloat16 with a float8_e4m3fn cache");
  check_groups(check, "k_cache");
  check_indices(check, q_starts, std::nullopt, kv_lens, page_table);
  check_numbers(check, tokens, scale, window, softcap, sinks);

  Tensor out = new_tensor(q, {tokens, heads, dim}, q.scalar_type());
  Tensor lse = new_tensor(q, {tokens, heads}, kFP32);
  if (tokens == 0 || heads == 0) return {out, lse};
  PagedAttentionParams p{.q_dtype = dtype_of(q)};
  PrefillAttentionParams& f = p.prefill;
  fill(f, check, q, k_cache, v_cache, q_starts, std::nullopt, kv_lens, page_table, scale, causal, window, softcap, sinks, out, lse);
  fill_scales(f, check, k_scale, v_scale);
  check.require(f.k_scale_batch_step == 0 && f.v_scale_batch_step == 0, "k_scale", "or v_scale has 2 dimensions, expected [1] or [K]");
  p.decodes = causal;
  if (p.decodes) fill_decode(p, q, fp8);
  f.skip_rows = p.decodes ? kDecodeRows : 0;
  f.beside = p.decodes;
  Tensor schedule = new_tensor(q, {2}, kLong), q_fp8 = out, q_scale = lse, workspace = lse;
  f.schedule = static_cast<unsigned long long*>(schedule.data_ptr());
  if (fp8) {
    q_fp8 = new_tensor(q, {tokens, heads, dim}, kE4M3);
    q_scale = new_tensor(q, {tokens, heads}, kFP32);
    p.q = f.q;
    p.q_token_stride = f.q_token_stride;
    p.q_head_stride = f.q_head_stride;
    p.q_fp8 = static_cast<uint8_t*>(q_fp8.data_ptr());
    p.q_scale = static_cast<float*>(q_scale.data_ptr());
    f.q = p.q_fp8;
    f.q_token_stride = heads * dim;
    f.q_head_stride = dim;
    f.q_scale = p.q_scale;
    f.q_scale_token_step = heads;
    f.q_scale_head_step = 1;
    f.dtype = DType::kE4M3;
    f.out_dtype = DType::kBF16;
  }
  const DeviceScope device(check);
  if (p.decodes) {
    p.decode.width = static_cast<int>(page_table.size(1));
    plan_decode_attention(p.decode);
    workspace = new_tensor(q, {p.decode.workspace_bytes / 4}, kFP32);
    p.decode.workspace = workspace.data_ptr();
  }
  paged_attention(p, stream_of(check));
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) {
  m.impl("prefill_attention", PYLLM_BOX(prefill_attention_cuda));
  m.impl("paged_attention", PYLLM_BOX(paged_attention_cuda));
}

}  // namespace pyllm
