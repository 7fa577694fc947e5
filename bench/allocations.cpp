#include "allocations.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {
std::atomic<std::uint64_t> count{0};
// What a plain new promises. On macOS that is more than the alignment of std::max_align_t.
constexpr std::size_t kPlain = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

void* try_counted(std::size_t bytes, std::size_t alignment) noexcept {
  count.fetch_add(1, std::memory_order_relaxed);
  const std::size_t room = (bytes + alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, room == 0 ? alignment : room);
}

void* counted(std::size_t bytes, std::size_t alignment) {
  void* p = try_counted(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
}  // namespace

namespace mlxtape::bench {
std::uint64_t allocations() { return count.load(std::memory_order_relaxed); }
}  // namespace mlxtape::bench

// Every form that allocates: one left to the C++ library would be freed here, which is not its
// partner. The array forms call these.
void* operator new(std::size_t bytes) { return counted(bytes, kPlain); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return try_counted(bytes, kPlain);
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return try_counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
