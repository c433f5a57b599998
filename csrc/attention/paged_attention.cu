#include "attention/paged_attention.cuh"

#include <algorithm>

#include "common/dispatch.h"

namespace pyllm {
namespace {

int multiprocessors() {
  int device = 0, sms = 0;
  check_launch(cudaGetDevice(&device), "paged_attention");
  check_launch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "paged_attention");
  return sms;
}

// Whether prefill and decode run side by side: where decode has work for all SMs (with few segments it wants clusters, for which it had to
// wait) and there may be a prompt. The items of an e4m3 cache's prefill are dealt out to all SMs at once.
bool side_by_side(const PagedAttentionParams& p) {
  const PrefillAttentionParams& f = p.prefill;
  return p.decodes && p.q_fp8 == nullptr && p.decode.cluster_shift == 0 && f.tokens - f.batch + 1 > f.skip_rows;
}

// As many of its CTAs as find room on `part` of `sms` SMs.
void narrow(DecodeAttentionParams& p, int part, int sms) {
  const int units = std::max(p.workers * p.lanes / p.clusters, 1);  // of a CTA: a worker of one lane
  p.workers = std::max(p.clusters * part / sms * units / p.lanes, 1);
  p.clusters = (p.workers * p.lanes + units - 1) / units;
  p.share = p.workers == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + p.workers - 1) / p.workers);
}

// Prefill starts on half of the SMs and lets decode in, which needs few more to read as fast as the memory serves; where the prompt is
// long, a second launch of prefill takes the SMs that decode leaves. Decode has all its CTAs running at once then, on the other half, which
// costs it 5 % of its rate: where it takes much longer than the prompt, its second half rather follows on the SMs that prefill leaves.
void launch_side_by_side(const PagedAttentionParams& p, cudaStream_t stream) {
  PrefillAttentionParams first = p.prefill;
  const int sms = multiprocessors();
  const int64_t rows = first.tokens - first.batch + 1;  // of the one prompt, if all other sequences are decodes
  const int64_t tile = first.dim <= 128 && first.window == 0 && first.softcap == 0.f ? 192 : 128,
                tiles = (rows + tile - 1) / tile * first.heads;
  const int half = sms / 2;
  first.launch = next_prefill_launch();
  first.beside = false;
  first.leads = true;
  first.first_ctas = half;
  first.all_ctas = tiles > 2 * half ? sms : half;
  DecodeAttentionParams decode = p.decode;
  decode.beside = true;
  if (rows * first.group >= 24 * first.batch) narrow(decode, sms - half, sms);
  prefill_attention(first, stream);
  decode_attention(decode, stream);
  if (first.all_ctas == half) return;
  PrefillAttentionParams second = first;
  second.leads = false;
  second.second = second.beside = true;
  prefill_attention(second, stream);
}

}  // namespace

void paged_attention(const PagedAttentionParams& p, cudaStream_t stream) {
  using namespace attention;
  if (p.q_fp8 != nullptr) {
    dispatch_dtype<DType::kBF16, DType::kFP16>("paged_attention: q", p.q_dtype, [&](auto t) {
      using T = typename decltype(t)::type;
      dispatch<64, 128, 256>("paged_attention: D", p.prefill.dim, [&](auto d) {
        const int64_t rows = p.prefill.tokens * p.prefill.heads, each = kQuantThreads / (d() / 8);
        const LaunchShape shape{.grid = dim3(static_cast<unsigned>((rows + each - 1) / each)), .block = dim3(kQuantThreads)};
        launch("paged_attention", shape, stream, quantize_rows_kernel<T, d()>, p);
      });
    });
  }
  if (side_by_side(p)) return launch_side_by_side(p, stream);
  // Decode ahead of prefill: its CTAs go one by one, and prefill takes each SM as it becomes free.
  if (p.decodes) decode_attention(p.decode, stream);
  prefill_attention(p.prefill, stream);
}

}  // namespace pyllm
