#include "backends/metal/blocks.h"

#include <algorithm>
#include <mutex>

#include "backends/metal/calls.h"

namespace mlxtape::metal {

// The first block that begins behind address.
std::size_t Blocks::first_after(const void* address) const {
  const auto after = std::upper_bound(sorted_.begin(), sorted_.end(), address,
                                      [](const void* a, const std::unique_ptr<Block>& block) {
                                        return static_cast<const char*>(a) < block->range.begin;
                                      });
  return static_cast<std::size_t>(after - sorted_.begin());
}

Block& Blocks::add(Range range, Retained buffer, unsigned long start) {
  auto block = std::make_unique<Block>();
  block->range = range;
  block->gpu = gpu_address(buffer.get()) + start;
  block->buffer = std::move(buffer);
  block->start = start;
  const std::unique_lock lock(mutex_);
  const auto place = sorted_.begin() + static_cast<std::ptrdiff_t>(first_after(range.begin));
  return **sorted_.insert(place, std::move(block));
}

Block* Blocks::find(const Range& range) const {
  const std::shared_lock lock(mutex_);
  for (std::size_t i = first_after(range.begin); i > 0; --i) {
    Block* block = sorted_[i - 1].get();
    if (block->range.holds(range)) return block;
  }
  return nullptr;
}

std::unique_ptr<Block> Blocks::remove(const Block& block) {
  const std::unique_lock lock(mutex_);
  std::size_t i = first_after(block.range.begin);
  while (i > 0 && sorted_[i - 1].get() != &block) --i;
  if (i == 0) return nullptr;
  std::unique_ptr<Block> removed = std::move(sorted_[i - 1]);
  sorted_.erase(sorted_.begin() + static_cast<std::ptrdiff_t>(i - 1));
  return removed;
}

std::size_t Blocks::size() const {
  const std::shared_lock lock(mutex_);
  return sorted_.size();
}

}  // namespace mlxtape::metal
