// Philox4x32-10 (Salmon et al., SC11) and the exponential that races for a token; bit for bit pyllm/ops/philox.py.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace pyllm::sampling {

// One request's random stream: key = seed, counter = (token / 4, index, position, 0), word token % 4.
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

// The words of tokens 4 * group ... 4 * group + 3.
__device__ __forceinline__ uint4 random_words(const Stream& s, uint32_t group) {
  return philox4x32(make_uint4(group, s.index, s.position, 0), s.seed_low, s.seed_high);
}

// log2(E), E = -ln(1 - u), u = (r + 1/2) / 2^32. Both ends keep full fp32 precision: small u through log1p, u near 1 through 1 - u,
// which is (2^32 - 1 - r + 1/2) / 2^32. So -33 <= log2(E) < 4.52.
__device__ __forceinline__ float log2_exponential(uint32_t r) {
  const bool low = r < 0x80000000u;
  const float u = (static_cast<float>(low ? r : ~r) + 0.5f) * 0x1p-32f;
  return log2f(-(low ? log1pf(-u) : logf(u)));
}
constexpr float kMaxLog2Exponential = 4.53f;
constexpr float kMinLog2Exponential = -33.01f;

// Word token % 4.
__device__ __forceinline__ uint32_t word_of(const uint4& words, uint32_t token) {
  const uint32_t low = token & 1 ? words.y : words.x, high = token & 1 ? words.w : words.z;
  return token & 2 ? high : low;
}

// A lower bound of u that needs no int-to-float conversion (those run at an eighth of the fp32 rate): 1 + floor(r / 2^9) / 2^23.
__device__ __forceinline__ float one_plus_u_floor(uint32_t r) { return __uint_as_float(0x3f800000u | (r >> 9)); }

}  // namespace pyllm::sampling
