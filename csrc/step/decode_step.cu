#include "step/decode_step.h"

#include "step/dispatch.h"
#include "step/launch.cuh"

namespace pyllm {

int64_t decode_step_workspace(int64_t rows, int64_t layers, int64_t d, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ffn) {
  return step::workspace_of(rows, layers, d, heads, kv_heads, head_dim, ffn).bytes;
}

bool decode_step_fits(int64_t rows, int64_t d, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t ffn, bool fp8_weights) {
  step::Args a{};
  a.p.rows = static_cast<int>(rows), a.p.layers = kStepLayers, a.p.d = static_cast<int>(d), a.p.heads = static_cast<int>(heads);
  a.p.kv_heads = static_cast<int>(kv_heads), a.p.head_dim = static_cast<int>(head_dim), a.p.ffn = static_cast<int>(ffn);
  a.p.fp8_weights = fp8_weights, a.p.vocab = 8;
  step::cut(a);
  return a.stages >= step::kLeastStages;
}

void decode_step(const StepParams& p, int64_t workspace_bytes, cudaStream_t stream) {
  int device = 0, sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const int ctas = sms < step::kMostCtas ? sms : step::kMostCtas;
  step::Args a = step::arguments(p, workspace_bytes, ctas);
  p.fp8_weights ? step::run_fp8(a, ctas, stream) : step::run_bf16(a, ctas, stream);
}

}  // namespace pyllm
