// Registers the CUDA kernels of csrc/attention: checks, allocation, Params, launch. Schema and CPU reference: pyllm/ops/decode.py.
#include "common/bind.h"
#include "attention/decode_attention.h"

#include <algorithm>
#include <bit>
#include <tuple>

namespace pyllm {
namespace {

using OptionalTensor = std::optional<Tensor>;
constexpr auto kBF16 = ScalarType::BFloat16, kFP16 = ScalarType::Half, kFP32 = ScalarType::Float, kE4M3 = ScalarType::Float8_e4m3fn,
               kInt = ScalarType::Int;

// Pages at any stride, each [P, K, D] dense, at multiples of 16 bytes.
void check_cache(Check& check, const Tensor& t, const char* name, const Tensor& q) {
  check(t, name).shape({"pages", "P", "K", "D"});
  check.require(t.scalar_type() == q.scalar_type() || t.scalar_type() == kE4M3, name, "is ", name_of(t.scalar_type()), ", expected ",
                name_of(q.scalar_type()), " like q or float8_e4m3fn");
  check.require(t.stride(3) == 1 && (t.size(2) == 1 || t.stride(2) == t.size(3)) && t.stride(1) == t.size(2) * t.size(3), name,
                "has pages with gaps, expected [P, K, D] dense");
  const int64_t page = check["P"];
  check.require(page >= 16 && page <= 1 << 20 && std::has_single_bit(static_cast<uint64_t>(page)), name, ".size(1) is ", page,
                ", expected a power of two, at least 16");
  check(t, name).aligned(16, t.element_size());
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
const int* ints(const Tensor& t) { return static_cast<const int*>(t.data_ptr()); }

std::tuple<Tensor, Tensor> decode_attention_cuda(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& page_table,
                                                 const Tensor& q_starts, const Tensor& kv_lens, double scale, int64_t window,
                                                 double softcap, const OptionalTensor& sinks, const OptionalTensor& k_scale,
                                                 const OptionalTensor& v_scale, int64_t max_q) {
  Check check("decode_attention");
  check(q, "q").shape({"T", "H", "D"}).dtype({kBF16, kFP16}).rows().aligned(8, 2);
  const int64_t tokens = check["T"], heads = check["H"], dim = check["D"];
  check.require(dim == 64 || dim == 128 || dim == 256, "q", ".size(2) is ", dim, ", expected 64, 128 or 256");
  check_cache(check, k_cache, "k_cache", q);
  check_cache(check, v_cache, "v_cache", q);
  check(v_cache, "v_cache").dtype_like(k_cache, "k_cache");
  const int64_t kv_heads = check["K"], page = check["P"];
  check.require(kv_heads > 0 && heads % kv_heads == 0, "q", "has H=", heads, " heads, expected a multiple of K=", kv_heads,
                " (from k_cache)");
  check(page_table, "page_table").shape({"B", "W"}).dtype({kInt}).rows();
  check(kv_lens, "kv_lens").shape({"B"}).dtype({kInt}).contiguous();
  const int64_t batch = check["B"], width = check["W"];
  check(q_starts, "q_starts").shape({"_"}).dtype({kInt}).contiguous();
  check.require(q_starts.size(0) == batch + 1, "q_starts", ".size(0) is ", q_starts.size(0), ", expected B+1=", batch + 1);
  check.require(window >= 0, "window", "is ", window, ", expected >= 1 (or None)");
  check.require(softcap >= 0 && softcap < __builtin_inf(), "softcap", "is ", softcap, ", expected finite and > 0 (or None)");
  check.require(max_q >= 1 && max_q <= 64, "max_q", "is ", max_q, ", expected 1 to 64");
  if (sinks) check(*sinks, "sinks").shape({"H"}).dtype({kFP32}).contiguous();
  const int k_step = check_scale(check, k_scale, "k_scale"), v_step = check_scale(check, v_scale, "v_scale");
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
                          .sinks = floats(sinks),
                          .k_scale = floats(k_scale),
                          .v_scale = floats(v_scale),
                          .k_scale_step = k_step,
                          .v_scale_step = v_step,
                          .out = out.data_ptr(),
                          .lse = static_cast<float*>(lse.data_ptr()),
                          .partial = nullptr,
                          .partial_sums = nullptr,
                          .tokens = tokens,
                          .batch = static_cast<int>(batch),
                          .heads = static_cast<int>(heads),
                          .kv_heads = static_cast<int>(kv_heads),
                          .group = static_cast<int>(heads / kv_heads),
                          .dim = static_cast<int>(dim),
                          .max_q = static_cast<int>(max_q),
                          .page_shift = std::countr_zero(static_cast<uint64_t>(page)),
                          .window = static_cast<int>(std::min<int64_t>(window, 1 << 30)),
                          .scale = static_cast<float>(scale),
                          .softcap = static_cast<float>(softcap),
                          .dtype = dtype_of(q),
                          .fp8_cache = k_cache.scalar_type() == kE4M3,
                          .workers = 0,
                          .row_tiles = 0,
                          .chunks = 0};
  const DeviceScope device(check);
  plan_decode_attention(p, width * page);
  const int64_t rows = 2 * static_cast<int64_t>(p.workers) * 8 * p.row_tiles;
  Tensor partial = new_tensor(q, {rows, dim + 2}, kFP32);
  p.partial = static_cast<float*>(partial.data_ptr());
  p.partial_sums = p.partial + rows * dim;
  decode_attention(p, stream_of(check));
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) { m.impl("decode_attention", PYLLM_BOX(decode_attention_cuda)); }

}  // namespace pyllm
