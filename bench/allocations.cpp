#include "allocations.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::uint64_t> count{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  count.fetch_add(1, std::memory_order_relaxed);
  const std::size_t room = (bytes + alignment - 1) / alignment * alignment;
  void* p = std::aligned_alloc(alignment, room == 0 ? alignment : room);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
}  // namespace

namespace mlxtape::bench {
std::uint64_t allocations() { return count.load(std::memory_order_relaxed); }
}  // namespace mlxtape::bench

void* operator new(std::size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
