// Blocks: which MTLBuffer an address of the host lies in, where the GPU sees it, and which command buffer used it last.
// Kernels get addresses of the host, as on the other backends; the launcher asks here what to bind.
//
// Threads    Every member may be called from any thread at any time. A Block stays where it is until it is removed, which
//            whoever owns the memory does when nobody uses it any more.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "backends/metal/objc.h"

namespace mlxtape::metal {

// Bytes [begin, end) of the host's addresses.
struct Range {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool empty() const { return begin == end; }
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
  bool holds(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

struct Block {
  Range range;
  Retained buffer;
  unsigned long start = 0;                 // where range begins in the buffer
  unsigned long long gpu = 0;              // address of range's begin
  std::atomic<bool> is_resident{false};    // in the residency set
  std::atomic<std::uint64_t> last_use{0};  // number of a command buffer

  unsigned long offset(const void* address) const {
    return start + static_cast<unsigned long>(static_cast<const char*>(address) - range.begin);
  }
};

class Blocks {
 public:
  Block& add(Range range, Retained buffer, unsigned long start = 0);
  // A block that holds all of this, null: there is none. Memory of files may be in several, any of which will do.
  Block* find(const Range& range) const;
  std::unique_ptr<Block> remove(const Block& block);
  std::size_t size() const;

 private:
  std::size_t first_after(const void* address) const;

  mutable std::shared_mutex mutex_;
  std::vector<std::unique_ptr<Block>> sorted_;  // by where they begin
};

}  // namespace mlxtape::metal
