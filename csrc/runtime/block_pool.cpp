#include "block_pool.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace pyllm::runtime {
namespace {

using std::to_string;

PageKey key_at(std::string_view keys, size_t i) {
  PageKey key;
  std::copy_n(keys.begin() + i * kKeyBytes, kKeyBytes, key.begin());
  return key;
}

void require_keys(std::string_view keys, const char* method) {
  if (keys.size() % kKeyBytes)
    throw std::invalid_argument(std::string("BlockPool: ") + method + " got " + to_string(keys.size()) +
                                " bytes of keys, expected a multiple of " + to_string(kKeyBytes));
}

}  // namespace

BlockPool::BlockPool(int64_t pages) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max() - kTopPriority - 1;  // the anchors have the numbers behind the pages'
  if (pages < 2 || pages > most)
    throw std::invalid_argument("BlockPool: pages is " + to_string(pages) + ", expected 2 to " + to_string(most) +
                                " (page 0 is the dummy page)");
  refs_.assign(pages, 0);
  next_.resize(pages + kTopPriority + 1);
  std::iota(next_.begin(), next_.end(), 0);  // an anchor alone is its own neighbour
  prev_ = next_;
  priority_.assign(pages, 0);
  named_.assign(pages, nullptr);
  free_.reserve(pages - 1);
  for (int64_t page = pages - 1; page > 0; --page) free_.push_back(static_cast<int32_t>(page));
}

void BlockPool::require_page(int64_t page, const char* method) const {
  if (page < 1 || page > total())
    throw std::invalid_argument(std::string("BlockPool: ") + method + " got page " + to_string(page) + ", expected 1 to " +
                                to_string(total()));
}

void BlockPool::push_idle(int32_t page) {
  const int32_t end = static_cast<int32_t>(anchor(priority_[page]));
  prev_[page] = prev_[end];
  next_[page] = end;
  next_[prev_[end]] = page;
  prev_[end] = page;
  ++cached_;
}

void BlockPool::remove_idle(int32_t page) {
  next_[prev_[page]] = next_[page];
  prev_[next_[page]] = prev_[page];
  --cached_;
}

template <typename Visit>
void BlockPool::walk_idle(Visit visit) const {
  for (int32_t priority = 0; priority <= kTopPriority; ++priority)
    for (int32_t page = next_[anchor(priority)]; page <= total(); page = next_[page]) visit(page, priority);
}

std::vector<int32_t> BlockPool::allocate(int64_t count) {
  if (count < 0) throw std::invalid_argument("BlockPool: allocate got count " + to_string(count) + ", expected 0 or more");
  if (count > available())
    throw std::runtime_error("BlockPool: allocate wants " + to_string(count) + " pages, " + to_string(available()) + " of " +
                             to_string(total()) + " are free");
  std::vector<int32_t> pages;
  pages.reserve(count);
  while (static_cast<int64_t>(pages.size()) < count && !free_.empty()) {
    pages.push_back(free_.back());
    free_.pop_back();
  }
  for (int32_t priority = 0; static_cast<int64_t>(pages.size()) < count;) {
    const int32_t page = next_[anchor(priority)];
    if (page > total()) {  // the anchor: none of this priority is left
      ++priority;
      continue;
    }
    remove_idle(page);
    keys_.erase(named_[page]->first);
    named_[page] = nullptr;
    priority_[page] = 0;
    pages.push_back(page);
  }
  for (int32_t page : pages) refs_[page] = 1;
  return pages;
}

std::vector<int32_t> BlockPool::match(std::string_view keys) {
  require_keys(keys, "match");
  std::vector<int32_t> pages;
  for (size_t i = 0; i < keys.size() / kKeyBytes; ++i) {
    const auto found = keys_.find(key_at(keys, i));
    if (found == keys_.end()) break;
    pages.push_back(found->second);
  }
  for (int32_t page : pages)
    if (refs_[page]++ == 0) remove_idle(page);
  return pages;
}

int64_t BlockPool::cache(std::string_view keys, std::span<const int32_t> pages, std::span<const int32_t> priorities) {
  require_keys(keys, "cache");
  if (keys.size() != kKeyBytes * pages.size())
    throw std::invalid_argument("BlockPool: cache got " + to_string(keys.size()) + " bytes of keys, expected " + to_string(kKeyBytes) +
                                " for each of " + to_string(pages.size()) + " pages");
  if (!priorities.empty() && priorities.size() != pages.size())
    throw std::invalid_argument("BlockPool: cache got " + to_string(priorities.size()) + " priorities, expected one for each of " +
                                to_string(pages.size()) + " pages");
  for (int32_t priority : priorities)
    if (priority < 0 || priority > kTopPriority)
      throw std::invalid_argument("BlockPool: cache got priority " + to_string(priority) + ", expected 0 to " + to_string(kTopPriority));
  for (int32_t page : pages) {
    require_page(page, "cache");
    if (refs_[page] == 0) throw std::invalid_argument("BlockPool: cache got page " + to_string(page) + ", which is free");
  }
  for (size_t i = 0; i < pages.size(); ++i) {
    const PageKey key = key_at(keys, i);
    if (named_[pages[i]] && named_[pages[i]]->first != key) return static_cast<int64_t>(i);
    const auto [entry, fresh] = keys_.try_emplace(key, pages[i]);
    if (entry->second != pages[i]) return static_cast<int64_t>(i);
    named_[pages[i]] = &*entry;
    priority_[pages[i]] = std::max(priority_[pages[i]], static_cast<int8_t>(priorities.empty() ? kPriority : priorities[i]));
  }
  return static_cast<int64_t>(pages.size());
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
  int8_t behind = 0;  // the highest priority of the pages behind this one
  for (size_t i = pages.size(); i-- > 0;)
    if (named_[pages[i]]) behind = priority_[pages[i]] = std::max(priority_[pages[i]], behind);
  // -1 marks a page as listed: one that was mentioned twice (and held twice) goes back once.
  for (size_t i = pages.size(); i-- > 0;) {
    const int32_t page = pages[i];
    if (refs_[page] != 0) continue;
    refs_[page] = -1;
    if (named_[page])
      push_idle(page);
    else
      free_.push_back(page);
  }
  for (int32_t page : pages)
    if (refs_[page] == -1) refs_[page] = 0;
}

void BlockPool::forget() {
  std::vector<int32_t> idle;
  walk_idle([&](int32_t page, int32_t) { idle.push_back(page); });
  free_.insert(free_.begin(), idle.rbegin(), idle.rend());
  std::iota(next_.begin() + total() + 1, next_.end(), static_cast<int32_t>(total() + 1));
  std::copy(next_.begin() + total() + 1, next_.end(), prev_.begin() + total() + 1);
  std::fill(priority_.begin(), priority_.end(), 0);
  cached_ = 0;
  keys_.clear();
  std::fill(named_.begin(), named_.end(), nullptr);
}

int64_t BlockPool::ref_count(int64_t page) const {
  require_page(page, "ref_count");
  return refs_[page];
}

void BlockPool::check() const {
  std::vector<bool> listed(refs_.size(), false);
  auto list = [&](int32_t page, bool cached) {
    if (page < 1 || page > total() || listed[page] || refs_[page] != 0 || (named_[page] != nullptr) != cached)
      throw std::runtime_error("BlockPool: page " + to_string(page) + " is on the free list wrongly");
    listed[page] = true;
  };
  for (int32_t page : free_) list(page, false);
  walk_idle([&](int32_t page, int32_t priority) {
    list(page, true);
    if (priority_[page] != priority) throw std::runtime_error("BlockPool: page " + to_string(page) + " waits in a wrong place");
  });
  int64_t named = 0;
  for (int64_t page = 1; page <= total(); ++page) {
    if (refs_[page] < 0 || (refs_[page] == 0) != listed[page]) throw std::runtime_error("BlockPool: page " + to_string(page) + " is lost");
    if (named_[page] && named_[page]->second != page) throw std::runtime_error("BlockPool: keys and pages disagree");
    named += named_[page] != nullptr;
  }
  if (named != static_cast<int64_t>(keys_.size())) throw std::runtime_error("BlockPool: keys and pages disagree");
}

}  // namespace pyllm::runtime
