#include "attention/prefill_attention.h"

#include <atomic>
#include <random>
#include <stdexcept>
#include <string>

#include "attention/prefill_shapes.h"
#include "common/device.h"

namespace pyllm {

unsigned long long next_prefill_launch() {
  static std::atomic<unsigned long long> count{std::random_device{}()};
  constexpr unsigned long long kSpread = 0x9E3779B97F4A7C15ull;  // odd: distinct counts stay distinct, and look like nothing in memory
  const unsigned long long mark = ++count * kSpread >> 24;
  return mark != 0 ? mark : next_prefill_launch();
}

void prefill_attention(const PrefillAttentionParams& p, cudaStream_t stream) {
  if (device_architecture() / 10 != 9) {
    throw std::runtime_error("prefill_attention: device is sm_" + std::to_string(device_architecture()) +
                             ", expected sm_90: simple_attention serves other GPUs");
  }
  if (p.dtype == DType::kE4M3) return prefill_attention_fp8(p, stream);
  using namespace attention;
  if (p.dim == 64 && p.v_dim == 64) return prefill_64(p, stream);
  if (p.dim == 96 && p.v_dim == 96) return prefill_96(p, stream);
  if (p.dim == 128 && p.v_dim == 128) return prefill_128(p, stream);
  if (p.dim == 192 && p.v_dim == 192) return prefill_192(p, stream);
  if (p.dim == 192 && p.v_dim == 128) return prefill_192_128(p, stream);
  if (p.dim == 256 && p.v_dim == 256) return prefill_256(p, stream);
  throw std::runtime_error("prefill_attention: no kernel for (D, Dv) (" + std::to_string(p.dim) + ", " + std::to_string(p.v_dim) + ")");
}

}  // namespace pyllm
