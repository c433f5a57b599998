// Packs one ragged step into the caller's int32 buffers (pinned host memory, in one piece, so that a step is one copy to the device).
// Host code, no torch, no Python. Letters: T tokens, B sequences, R rows with logits, W page-table width of this step, P page size.
//
//   ids, positions, slots [T]   slot = page * P + offset: where the token's keys and values go
//   q_starts [B + 1]            first token of each sequence, then T
//   kv_lens [B]                 keys after this step
//   page_table [B, W]           dense at the step's width; unused entries name the dummy page 0
//   logit_rows [R]              the last `rows` tokens of each sequence: those whose logits are wanted
#pragma once
#include <cstdint>
#include <span>

namespace pyllm::runtime {

struct StepBuffers {  // capacities: T_max; B_max + 1; B_max; B_max * W_max; R_max
  std::span<int32_t> ids, positions, slots, q_starts, kv_lens, page_table, logit_rows;
};

class StepPacker {
 public:
  // pages: ids 1 .. pages - 1 are valid; vocab: token ids 0 .. vocab - 1 are valid.
  StepPacker(const StepBuffers& buffers, int64_t page_size, int64_t pages, int64_t vocab);

  // Starts an empty step whose page table is `width` wide.
  void begin(int64_t width);
  // Appends tokens at positions start, start + 1, ...; pages: the sequence's pages from position 0 on (more than needed is fine).
  // rows: how many of them, the last ones, want logits. Throws std::invalid_argument, nothing appended, for anything that does not fit or
  // is out of range.
  void add(std::span<const int32_t> tokens, int64_t start, std::span<const int32_t> pages, int64_t rows);

  int64_t tokens() const { return tokens_; }
  int64_t sequences() const { return sequences_; }
  int64_t rows() const { return rows_; }

 private:
  // Pages that hold start + count positions, once everything is in range.
  int64_t validate(std::span<const int32_t> tokens, int64_t start, std::span<const int32_t> pages, int64_t rows) const;

  StepBuffers b_;
  int64_t page_size_, pages_, vocab_;
  int64_t width_ = 0, tokens_ = 0, sequences_ = 0, rows_ = 0;
};

}  // namespace pyllm::runtime
