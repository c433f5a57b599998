#include "step_packer.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace pyllm::runtime {
namespace {

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

template <class... Args>
void require(bool ok, const Args&... args) {
  if (ok) [[likely]]
    return;
  auto text = [](const auto& arg) {
    if constexpr (std::is_integral_v<std::decay_t<decltype(arg)>>)
      return std::to_string(arg);
    else
      return std::string(arg);
  };
  throw std::invalid_argument("StepPacker: " + (text(args) + ...));
}

int64_t size_of(std::span<const int32_t> s) { return static_cast<int64_t>(s.size()); }

}  // namespace

StepPacker::StepPacker(const StepBuffers& buffers, int64_t page_size, int64_t pages, int64_t vocab)
    : b_(buffers), page_size_(page_size), pages_(pages), vocab_(vocab) {
  require(page_size >= 1, "page_size is ", page_size, ", expected 1 or more");
  require(pages >= 2, "pages is ", pages, ", expected 2 or more");
  require(pages <= kMaxInt / page_size, "pages * page_size is beyond int32, got ", pages, " * ", page_size);
  require(vocab >= 1 && vocab <= kMaxInt, "vocab is ", vocab, ", expected 1 to 2147483647");
  const int64_t t = size_of(b_.ids), s = size_of(b_.kv_lens);
  require(size_of(b_.positions) == t && size_of(b_.slots) == t, "ids, positions and slots differ in size");
  require(size_of(b_.q_starts) == s + 1, "q_starts has ", size_of(b_.q_starts), " entries, expected kv_lens + 1 = ", s + 1);
  b_.q_starts[0] = 0;
}

void StepPacker::begin(int64_t width) {
  require(width >= 0, "width is ", width, ", expected 0 or more");
  width_ = width;
  tokens_ = sequences_ = rows_ = 0;
}

int64_t StepPacker::validate(std::span<const int32_t> tokens, int64_t start, std::span<const int32_t> pages, int64_t rows) const {
  const int64_t count = size_of(tokens), capacity = size_of(pages) * page_size_;
  require(count >= 1, "tokens is empty, expected at least one");
  require(start >= 0, "start is ", start, ", expected 0 or more");
  require(start <= capacity - count, "positions ", start, " to ", start, " + ", count, " need more than the ", size_of(pages),
          " pages given");
  require(tokens_ + count <= size_of(b_.ids), "the step is full: ", tokens_, " + ", count, " tokens, capacity ", size_of(b_.ids));
  require(sequences_ < size_of(b_.kv_lens), "the step is full: capacity ", size_of(b_.kv_lens), " sequences");
  require(rows >= 0 && rows <= count, "rows is ", rows, ", expected 0 to the ", count, " tokens given");
  require(rows_ + rows <= size_of(b_.logit_rows), "the step is full: capacity ", size_of(b_.logit_rows), " rows with logits");
  const int64_t need = (start + count + page_size_ - 1) / page_size_;
  require(need <= width_, need, " pages do not fit the width ", width_);
  require((sequences_ + 1) * width_ <= size_of(b_.page_table), "the page table is full: ", sequences_ + 1, " rows of ", width_,
          ", capacity ", size_of(b_.page_table));
  for (int32_t token : tokens) require(token >= 0 && token < vocab_, "token id ", token, " is outside 0 to ", vocab_ - 1);
  for (int32_t page : pages.first(need)) require(page >= 1 && page < pages_, "page ", page, " is outside 1 to ", pages_ - 1);
  return need;
}

void StepPacker::add(std::span<const int32_t> tokens, int64_t start, std::span<const int32_t> pages, int64_t rows) {
  const int64_t need = validate(tokens, start, pages, rows), count = size_of(tokens);
  std::copy(tokens.begin(), tokens.end(), b_.ids.begin() + tokens_);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = start + i;
    b_.positions[tokens_ + i] = static_cast<int32_t>(position);
    b_.slots[tokens_ + i] = static_cast<int32_t>(pages[position / page_size_] * page_size_ + position % page_size_);
  }
  const auto row = b_.page_table.begin() + sequences_ * width_;
  std::fill(std::copy_n(pages.begin(), need, row), row + width_, 0);
  tokens_ += count;
  b_.kv_lens[sequences_] = static_cast<int32_t>(start + count);
  b_.q_starts[++sequences_] = static_cast<int32_t>(tokens_);
  for (int64_t row = tokens_ - rows; row < tokens_; ++row) b_.logit_rows[rows_++] = static_cast<int32_t>(row);
}

}  // namespace pyllm::runtime
