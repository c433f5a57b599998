// Philox4x32-10 (Salmon et al., SC11); bit for bit pyllm/ops/philox.py.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace pyllm::sampling {

// One request's random stream: key = seed, counter = (round, index, position, 0).
struct Stream {
  uint32_t seed_low, seed_high, index, position;
};

__device__ __forceinline__ uint4 philox4x32(uint4 c, uint32_t k0, uint32_t k1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c.x) * 0xD2511F53u;
    const uint64_t b = static_cast<uint64_t>(c.z) * 0xCD9E8D57u;
    c = make_uint4(static_cast<uint32_t>(b >> 32) ^ c.y ^ k0, static_cast<uint32_t>(b), static_cast<uint32_t>(a >> 32) ^ c.w ^ k1,
                   static_cast<uint32_t>(a));
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// 64 uniform bits for a round of the draw: words 0 (low) and 1.
__device__ __forceinline__ uint64_t random_bits(const Stream& s, uint32_t round) {
  const uint4 words = philox4x32(make_uint4(round, s.index, s.position, 0), s.seed_low, s.seed_high);
  return static_cast<uint64_t>(words.y) << 32 | words.x;
}

}  // namespace pyllm::sampling
