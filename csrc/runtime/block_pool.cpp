#include "block_pool.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace pyllm::runtime {

using std::to_string;

BlockPool::BlockPool(int64_t pages) {
  if (pages < 2 || pages > std::numeric_limits<int32_t>::max())
    throw std::invalid_argument("BlockPool: pages is " + to_string(pages) + ", expected 2 to 2147483647 (page 0 is the dummy page)");
  refs_.assign(pages, 0);
  free_.reserve(pages - 1);
  for (int64_t page = pages - 1; page > 0; --page) free_.push_back(static_cast<int32_t>(page));
}

void BlockPool::require_page(int64_t page, const char* method) const {
  if (page < 1 || page > total())
    throw std::invalid_argument(std::string("BlockPool: ") + method + " got page " + to_string(page) + ", expected 1 to " +
                                to_string(total()));
}

std::vector<int32_t> BlockPool::allocate(int64_t count) {
  if (count < 0) throw std::invalid_argument("BlockPool: allocate got count " + to_string(count) + ", expected 0 or more");
  if (count > available())
    throw std::runtime_error("BlockPool: allocate wants " + to_string(count) + " pages, " + to_string(available()) + " of " +
                             to_string(total()) + " are free");
  std::vector<int32_t> pages(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - count);
  for (int32_t page : pages) refs_[page] = 1;
  return pages;
}

void BlockPool::ref(std::span<const int32_t> pages) {
  for (int32_t page : pages) {
    require_page(page, "ref");
    if (refs_[page] == 0) throw std::invalid_argument("BlockPool: ref got page " + to_string(page) + ", which is free");
  }
  for (int32_t page : pages) ++refs_[page];
}

void BlockPool::free(std::span<const int32_t> pages) {
  for (int32_t page : pages) require_page(page, "free");
  for (size_t i = 0; i < pages.size(); ++i) {
    if (refs_[pages[i]] == 0) {
      for (size_t j = 0; j < i; ++j) ++refs_[pages[j]];
      throw std::invalid_argument("BlockPool: free got page " + to_string(pages[i]) + " once more than it is held (double free)");
    }
    --refs_[pages[i]];
  }
  // -1 marks a page as listed: one that was mentioned twice (and held twice) goes back once.
  for (int32_t page : pages)
    if (refs_[page] == 0) {
      refs_[page] = -1;
      free_.push_back(page);
    }
  for (int32_t page : pages)
    if (refs_[page] == -1) refs_[page] = 0;
}

int64_t BlockPool::ref_count(int64_t page) const {
  require_page(page, "ref_count");
  return refs_[page];
}

void BlockPool::check() const {
  std::vector<bool> listed(refs_.size(), false);
  for (int32_t page : free_) {
    if (page < 1 || page > total() || listed[page] || refs_[page] != 0)
      throw std::runtime_error("BlockPool: page " + to_string(page) + " is on the free list wrongly");
    listed[page] = true;
  }
  for (int64_t page = 1; page <= total(); ++page)
    if (refs_[page] < 0 || (refs_[page] == 0) != listed[page]) throw std::runtime_error("BlockPool: page " + to_string(page) + " is lost");
}

}  // namespace pyllm::runtime
