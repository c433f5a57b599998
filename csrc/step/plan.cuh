// What the host adds to the parameters of a decode step: how the products are cut, and where things lie in shared memory and workspace.
#pragma once
#include <cuda.h>

#include "step/decode_step.h"

namespace pyllm::step {

constexpr int kWarps = 8;  // that multiply and attend
constexpr int kConsumers = kWarps * 32;
constexpr int kFinishers = 3;               // warps that finish sums
constexpr int kThreads = kConsumers + 128;  // and a warpgroup of them and the warp that loads weights
constexpr int kUnit = 8;                    // rows of a weight that a CTA takes at a time
constexpr int kChunk = 2048;                // bytes of a row in a stage of the ring, at most
constexpr int kStage = kUnit * kChunk;
constexpr int kLine = 128;      // bytes of a row that lie together in a stage, the span of the swizzle; 64 where rows end in half a line
constexpr int kStepBytes = 64;  // of a row: what the four lanes of a row hold in one access
constexpr int kAreas = 4;       // of partial sums: as many units a warp may be ahead of the finishing one
constexpr int kMaxSplits = 32;
constexpr int kHeader = 1024;

// Counters at the head of the workspace.
struct Header {
  uint32_t steps, done, rows;  // steps so far; CTAs done with this one; rows of the last one
};

// Byte offsets within the exchange rows of one layer: qkv, attention output, the stream after attention, gated activations, the stream.
struct Rows {
  int qkv, attended, middle, gated, stream, bytes;
};

struct Cut {
  int units;            // of kUnit rows of the weight
  int row_bytes;        // of the weight
  int chunk;            // bytes of a row at a time, a multiple of 512: each warp an eighth
  int line;             // kLine or half of it
  const uint8_t* base;  // the lowest of the layers' weights: the map counts lines from here
};

struct Args {
  CUtensorMap map[kStepProducts][2];  // of a stage of a row, and of what is left of it
  StepParams p;
  Cut cut[kStepProducts];
  int stages, flying, flying_waiting, splits;  // of the ring; on their way at most; pieces of a sequence's keys
  float inverse_d;
  int barriers, waiting, sums, squares, table, x, x_bytes;  // offsets in shared memory
  Rows rows;
  uint8_t *zeros, *partials, *sets;
  int64_t set_bytes;
};

// Bytes between rows of x: an odd multiple of 64, so that neighbouring rows fill the banks.
__host__ __device__ constexpr int pitch_of(int row_bytes) { return (row_bytes + 127) / 128 * 128 + 64; }

}  // namespace pyllm::step
