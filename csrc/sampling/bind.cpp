// torch.ops.pyllm.sample_tokens and token_logprobs on CUDA: checks, outputs, Params, launch.
#include <tuple>

#include "common/bind.h"
#include "sampling/sample_tokens.h"
#include "sampling/token_logprobs.h"

namespace pyllm {
namespace {

constexpr int64_t kMaxVocab = int64_t{1} << 20;
constexpr int64_t kMaxTopN = 20;
using MaybeTensor = std::optional<Tensor>;

void check_logits(Check& check, const Tensor& logits) {
  check(logits, "logits").shape({"B", "V"}).dtype({ScalarType::BFloat16, ScalarType::Half, ScalarType::Float}).rows();
  check.require(check["V"] >= 1 && check["V"] <= kMaxVocab, "logits", "has V=", check["V"], ", expected 1 to ", kMaxVocab);
}

// A checked per-row argument: [B], contiguous.
template <class T>
const T* per_row(Check& check, const MaybeTensor& t, const char* name, ScalarType dtype) {
  if (!t) return nullptr;
  check(*t, name).shape({"B"}).dtype({dtype}).rows();
  return static_cast<const T*>(t->data_ptr());
}

Tensor sample_tokens_cuda(const Tensor& logits, const MaybeTensor& temperature, const MaybeTensor& top_k, const MaybeTensor& top_p,
                          const MaybeTensor& min_p, const MaybeTensor& seed, const MaybeTensor& index, const MaybeTensor& position) {
  Check check("sample_tokens");
  check_logits(check, logits);
  const std::pair<const char*, const MaybeTensor*> others[] = {{"top_k", &top_k}, {"top_p", &top_p}, {"min_p", &min_p},
                                                               {"seed", &seed},   {"index", &index}, {"position", &position}};
  for (const auto& [name, t] : others) check.require(!*t || temperature, name, "is given without temperature");
  const SampleTokensParams p0{
      .logits = logits.data_ptr(),
      .row_stride = logits.stride(0),
      .rows = check["B"],
      .vocab = check["V"],
      .dtype = dtype_of(logits),
      .temperature = per_row<float>(check, temperature, "temperature", ScalarType::Float),
      .top_k = per_row<int32_t>(check, top_k, "top_k", ScalarType::Int),
      .top_p = per_row<float>(check, top_p, "top_p", ScalarType::Float),
      .min_p = per_row<float>(check, min_p, "min_p", ScalarType::Float),
      .seed = per_row<int64_t>(check, seed, "seed", ScalarType::Long),
      .index = per_row<int32_t>(check, index, "index", ScalarType::Int),
      .position = per_row<int32_t>(check, position, "position", ScalarType::Int),
      .tokens = nullptr,
  };
  for (const auto& [name, t] : {others[3], others[4], others[5]}) {
    check.require(!temperature || *t, name, "is missing, expected a tensor beside temperature");
  }
  DeviceScope device(check);
  Tensor tokens = new_tensor(logits, {p0.rows}, ScalarType::Int);
  if (p0.rows == 0) return tokens;
  SampleTokensParams p = p0;
  p.tokens = static_cast<int32_t*>(tokens.data_ptr());
  sample_tokens(p, stream_of(check));
  return tokens;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> token_logprobs_cuda(const Tensor& logits, const Tensor& tokens, int64_t top_n) {
  Check check("token_logprobs");
  check_logits(check, logits);
  check(tokens, "tokens").shape({"B"}).dtype({ScalarType::Int}).rows();
  check.require(top_n >= 0 && top_n <= kMaxTopN, "top_n", "is ", top_n, ", expected 0 to ", kMaxTopN);
  DeviceScope device(check);
  const int64_t rows = check["B"];
  Tensor logprob = new_tensor(logits, {rows}, ScalarType::Float);
  Tensor rank = new_tensor(logits, {rows}, ScalarType::Int);
  Tensor top_logprobs = new_tensor(logits, {rows, top_n}, ScalarType::Float);
  Tensor top_tokens = new_tensor(logits, {rows, top_n}, ScalarType::Int);
  if (rows > 0) {
    token_logprobs({.logits = logits.data_ptr(),
                    .row_stride = logits.stride(0),
                    .rows = rows,
                    .vocab = check["V"],
                    .dtype = dtype_of(logits),
                    .tokens = static_cast<const int32_t*>(tokens.data_ptr()),
                    .top_n = top_n,
                    .logprob = static_cast<float*>(logprob.data_ptr()),
                    .rank = static_cast<int32_t*>(rank.data_ptr()),
                    .top_logprobs = static_cast<float*>(top_logprobs.data_ptr()),
                    .top_tokens = static_cast<int32_t*>(top_tokens.data_ptr())},
                   stream_of(check));
  }
  return {logprob, rank, top_logprobs, top_tokens};
}

}  // namespace
}  // namespace pyllm

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) {
  m.impl("sample_tokens", PYLLM_BOX(pyllm::sample_tokens_cuda));
  m.impl("token_logprobs", PYLLM_BOX(pyllm::token_logprobs_cuda));
}
