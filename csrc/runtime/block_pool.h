// Allocator of KV pages: which of the pool's page ids are in use, by how many holders, and which unused ones still hold a known prefix.
// Host code, no torch, no Python.
//
// Page 0 is the dummy page: it is never handed out, so page-table tails and padding rows always name a page that exists and that nobody
// owns. The other ids are handed out last-freed-first (their lines are the likeliest to be in L2), fresh ones in ascending order.
// Invariant: free + used + cached == total == pages - 1.
//
// A key (SHA-256) names the content of a full page and of all pages before it, so the keys of a sequence form a path of a prefix tree.
// A page with a key stays cached when its last holder leaves, and is given away again once no page is free: those of the lowest priority
// first, the least recently used first among them. Holders give their pages back in one call, deepest first, and each page then has at
// least the priority of those behind it, so it always goes after them: the next page to go is a leaf.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pyllm::runtime {

inline constexpr size_t kKeyBytes = 32;
inline constexpr int32_t kTopPriority = 100, kPriority = 35;  // those of TensorRT-LLM: 0 to 100, 35 where nothing is said
using PageKey = std::array<char, kKeyBytes>;

struct PageKeyHash {  // the bytes of a key are random already
  size_t operator()(const PageKey& key) const {
    size_t word;
    std::memcpy(&word, key.data(), sizeof word);
    return word;
  }
};

class BlockPool {
 public:
  explicit BlockPool(int64_t pages);  // at least 2, the dummy page included

  // All or nothing; each page starts with one reference. Throws std::runtime_error when fewer are free or cached.
  std::vector<int32_t> allocate(int64_t count);
  // The pages of the longest known beginning of these keys (kKeyBytes each), each with one holder more.
  std::vector<int32_t> match(std::string_view keys);
  // Names the content of held pages, in the order of their sequence; returns how many are now known by these keys. Stops at a key that
  // names another page: a deeper page of this sequence would hang below a page that its holder does not hold.
  // priorities: one for each page, none: kPriority for all. A known page keeps the higher of its own and the one given.
  int64_t cache(std::string_view keys, std::span<const int32_t> pages, std::span<const int32_t> priorities = {});
  // One more holder for each page; all or nothing.
  void ref(std::span<const int32_t> pages);
  // One holder less for each page, the last first; at none back to the pool, or cached. All or nothing, a page freed once too often throws
  // std::invalid_argument.
  void free(std::span<const int32_t> pages);
  // Drops every key: cached pages become free, held ones are not cached when their last holder leaves.
  void forget();

  int64_t total() const { return static_cast<int64_t>(refs_.size()) - 1; }
  int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }
  int64_t cached() const { return cached_; }
  int64_t available() const { return free_pages() + cached_; }
  int64_t used() const { return total() - available(); }
  int64_t ref_count(int64_t page) const;
  // Walks everything: throws std::runtime_error unless each page is held, or free, or cached, and keys and pages name each other.
  void check() const;

 private:
  using Keys = std::unordered_map<PageKey, int32_t, PageKeyHash>;

  void require_page(int64_t page, const char* method) const;
  int64_t anchor(int32_t priority) const { return total() + 1 + priority; }
  void push_idle(int32_t page);
  void remove_idle(int32_t page);
  template <typename Visit>
  void walk_idle(Visit visit) const;  // in the order in which they are given away

  std::vector<int32_t> refs_;                   // holders per page; [0] is unused
  std::vector<int32_t> free_;                   // a stack: the back is handed out next
  std::vector<int32_t> next_, prev_;            // rings of cached pages without a holder, one a priority, least recently used first
  std::vector<const Keys::value_type*> named_;  // a page's entry in keys_ (entries do not move), or null
  std::vector<int8_t> priority_;                // of pages with a key; 0 without one
  Keys keys_;
  int64_t cached_ = 0;
};

}  // namespace pyllm::runtime
