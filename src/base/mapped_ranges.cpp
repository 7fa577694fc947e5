#include "mlxtape/base/mapped_ranges.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace mlxtape {

namespace {

// One range. Ranges are used again and never freed, so that a handler can walk over them at any moment: there are as many
// as files were ever mapped at once.
struct Range {
  std::atomic<std::uintptr_t> begin{0}, end{0};  // end 0: free
  std::array<char, 4096> path{};
  Range* next = nullptr;
};

std::mutex changes;
std::atomic<Range*> first{nullptr};
static_assert(std::atomic<Range*>::is_always_lock_free &&
              std::atomic<std::uintptr_t>::is_always_lock_free);  // a handler may use nothing else

// NOLINTNEXTLINE(cppcoreguidelines-pro-type-reinterpret-cast): addresses are compared as numbers
std::uintptr_t number_of(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

}  // namespace

const char* mapped_file_at(const void* address) noexcept {
  const std::uintptr_t at = number_of(address);
  for (const Range* range = first.load(); range != nullptr; range = range->next) {
    if (at >= range->begin.load() && at < range->end.load()) return range->path.data();
  }
  return nullptr;
}

void note_mapped(std::span<const std::byte> bytes, const std::string& path) {
  const std::lock_guard lock(changes);
  Range* range = first.load();
  while (range != nullptr && range->end.load() != 0) range = range->next;
  const bool is_new = range == nullptr;
  if (is_new) {
    range = new Range;
    range->next = first.load();
  }
  const std::size_t length = std::min(path.size(), range->path.size() - 1);
  std::copy_n(path.begin(), length, range->path.begin());
  range->path[length] = '\0';
  range->begin = number_of(bytes.data());
  range->end = number_of(bytes.data()) + bytes.size();
  if (is_new) first = range;
}

void forget_mapped(std::span<const std::byte> bytes) noexcept {
  const std::lock_guard lock(changes);
  for (Range* range = first.load(); range != nullptr; range = range->next) {
    if (range->begin.load() == number_of(bytes.data()) && range->end.load() != 0) {
      range->end = 0;
      return;
    }
  }
}

}  // namespace mlxtape
