// The checks that the registrations of the attention ops share.
#pragma once
#include "common/bind.h"

#include <bit>

namespace pyllm {

constexpr auto kBF16 = ScalarType::BFloat16, kFP16 = ScalarType::Half, kFP32 = ScalarType::Float, kE4M3 = ScalarType::Float8_e4m3fn,
               kInt = ScalarType::Int, kLong = ScalarType::Long, kS8 = ScalarType::Char;

// Null without a tensor.
template <class T>
const T* pointer(const std::optional<Tensor>& t) {
  return t ? static_cast<const T*>(t->data_ptr()) : nullptr;
}

// Pages, of a tensor whose second dimension is P.
inline void check_page(Check& check, const char* name, int64_t least) {
  const int64_t page = check["P"];
  check.require(page >= least && page <= 1 << 20 && std::has_single_bit(static_cast<uint64_t>(page)), name, ".size(1) is ", page,
                ", expected a power of two, at least ", least);
}

// What decode streams: pages at any stride, each [P, K, D] dense, at multiples of 16 bytes; q's dtype, e4m3 or, where `s8`, int8.
inline void check_cache(Check& check, const Tensor& t, const char* name, const Tensor& q, bool s8) {
  check(t, name).shape({"pages", "P", "K", "D"});
  check.require(t.scalar_type() == q.scalar_type() || t.scalar_type() == kE4M3 || (s8 && t.scalar_type() == kS8), name, "is ",
                name_of(t.scalar_type()), ", expected ", name_of(q.scalar_type()), " like q",
                s8 ? ", float8_e4m3fn or int8" : " or float8_e4m3fn");
  check.require(t.stride(3) == 1 && (t.size(2) == 1 || t.stride(2) == t.size(3)) && t.stride(1) == t.size(2) * t.size(3), name,
                "has pages with gaps, expected [P, K, D] dense");
  check_page(check, name, 16);
  check(t, name).aligned(16, t.element_size());
}

inline void check_groups(Check& check, const char* keys) {
  const int64_t heads = check["H"], kv_heads = check["K"];
  check.require(kv_heads > 0 && heads % kv_heads == 0, "q", "has H=", heads, " heads, expected a multiple of K=", kv_heads, " (from ", keys,
                ")");
}

// [1] or [K] fp32; its step per KV head.
inline int check_scale(Check& check, const std::optional<Tensor>& scale, const char* name) {
  if (!scale) return 0;
  check(*scale, name).dtype({kFP32}).contiguous();
  const int64_t size = scale->dim() == 1 ? scale->size(0) : -1;
  check.require(size == 1 || size == check["K"], name, "has ", scale->numel(), " elements in ", scale->dim(),
                " dimensions, expected [1] or [K=", check["K"], "]");
  return size == 1 ? 0 : 1;
}

// Which rows of q and which keys make a sequence: contiguous keys by kv_starts, or pages by page_table and kv_lens.
inline void check_indices(Check& check, const Tensor& q_starts, const std::optional<Tensor>& kv_starts,
                          const std::optional<Tensor>& kv_lens, const std::optional<Tensor>& page_table) {
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

// Bits of keys for each row of q, after check_indices.
inline void check_mask(Check& check, const std::optional<Tensor>& mask, const std::optional<Tensor>& mask_starts) {
  check.require(mask.has_value() || !mask_starts.has_value(), "mask_starts", "is given, expected it only with a mask");
  if (mask) check(*mask, "mask").shape({"T", "words"}).dtype({kInt}).rows();
  if (!mask_starts) return;
  check(*mask_starts, "mask_starts").shape({"_"}).dtype({kInt}).contiguous();
  check.require(mask_starts->size(0) == check["B+1"] - 1, "mask_starts", ".size(0) is ", mask_starts->size(0),
                ", expected B=", check["B+1"] - 1, " (from q_starts)");
}

inline void check_scores(Check& check, int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  if (sinks) check(*sinks, "sinks").shape({"H"}).dtype({kFP32}).contiguous();
  check.require(window >= 0, "window", "is ", window, ", expected >= 1 (or None)");
  check.require(softcap >= 0 && softcap < __builtin_inf(), "softcap", "is ", softcap, ", expected finite and > 0 (or None)");
}

}  // namespace pyllm
