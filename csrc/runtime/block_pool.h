// Allocator of KV pages: which of the pool's page ids are in use, and by how many holders. Host code, no torch, no Python.
//
// Page 0 is the dummy page: it is never handed out, so page-table tails and padding rows always name a page that exists and that nobody
// owns. The other ids are handed out last-freed-first (their lines are the likeliest to be in L2), fresh ones in ascending order.
// Invariant: available + used == total == pages - 1.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

namespace pyllm::runtime {

class BlockPool {
 public:
  explicit BlockPool(int64_t pages);  // 2 .. 2^31 - 1, the dummy page included

  // All or nothing; each page starts with one reference. Throws std::runtime_error when fewer are free.
  std::vector<int32_t> allocate(int64_t count);
  // One more holder for each page; all or nothing.
  void ref(std::span<const int32_t> pages);
  // One holder less for each page, back to the pool at none; all or nothing, a page freed once too often throws std::invalid_argument.
  void free(std::span<const int32_t> pages);

  int64_t total() const { return static_cast<int64_t>(refs_.size()) - 1; }
  int64_t available() const { return static_cast<int64_t>(free_.size()); }
  int64_t used() const { return total() - available(); }
  int64_t ref_count(int64_t page) const;
  // Walks everything: throws std::runtime_error unless the free list is exactly the set of pages without a holder.
  void check() const;

 private:
  void require_page(int64_t page, const char* method) const;

  std::vector<int32_t> refs_;  // holders per page; [0] is unused
  std::vector<int32_t> free_;  // a stack: the back is handed out next
};

}  // namespace pyllm::runtime
