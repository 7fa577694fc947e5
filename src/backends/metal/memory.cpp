#include "backends/metal/memory.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "backends/metal/transfers.h"

namespace mlxtape::metal {

namespace {

Range range_of(const void* address, std::size_t bytes) {
  const auto* begin = static_cast<const char*>(address);
  return {begin, begin + bytes};
}

}  // namespace

// Null: the system has no more.
Block* DeviceMemory::new_block(std::size_t bytes) {
  const AutoreleasePool pool;
  Retained buffer = new_buffer(machine_.device.get(), bytes);
  if (!buffer) return nullptr;
  const void* address = contents(buffer.get());
  Block& block = machine_.blocks.add(range_of(address, bytes), std::move(buffer));
  machine_.stream.residency().collect(block);
  return &block;
}

void DeviceMemory::let_go(Block& block) {
  machine_.stream.residency().forget(block);
  machine_.stream.bury(machine_.blocks.remove(block));
}

void* DeviceMemory::allocate(std::size_t bytes, bool& is_zero) {
  is_zero = false;
  machine_.stream.check();
  if (bytes < kSmall) return allocate_small(bytes);
  const Block* block = new_block(bytes);
  return block == nullptr ? nullptr : const_cast<char*>(block->range.begin);
}

void DeviceMemory::release(void* address, std::size_t bytes) noexcept {
  if (bytes < kSmall) return release_small(address, bytes);
  let_go(*machine_.blocks.find(range_of(address, bytes)));
}

// ---- small blocks ----

void* DeviceMemory::cut(Shared& from, std::size_t bytes) {
  for (auto place = from.free.begin(); place != from.free.end(); ++place) {
    const auto [offset, room] = *place;
    if (room < bytes) continue;
    from.free.erase(place);
    if (room != bytes) from.free.emplace(offset + bytes, room - bytes);
    return const_cast<char*>(from.block->range.begin) + offset;
  }
  return nullptr;
}

void* DeviceMemory::allocate_small(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (Shared& each : shared_) {
    if (void* address = cut(each, bytes)) return address;
  }
  Block* block = new_block(kShared);
  if (block == nullptr) return nullptr;
  shared_.push_back({block, {{0, kShared}}});
  return cut(shared_.back(), bytes);
}

void DeviceMemory::release_small(void* address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const Range range = range_of(address, bytes);
  const auto of = std::find_if(shared_.begin(), shared_.end(),
                               [&](const Shared& each) { return each.block->range.holds(range); });
  std::size_t first = of->block->offset(address), end = first + bytes;
  const auto after = of->free.find(end);
  if (after != of->free.end()) {
    end += after->second;
    of->free.erase(after);
  }
  const auto next = of->free.lower_bound(first);
  if (next != of->free.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == first) {
      first = before->first;
      of->free.erase(before);
    }
  }
  of->free.emplace(first, end - first);
  // One stays for the next small block, or a program that makes and drops one tensor would ask the system each time.
  const auto unused = std::count_if(shared_.begin(), shared_.end(),
                                    [](const Shared& each) { return each.is_unused(); });
  if (!of->is_unused() || unused < 2) return;
  Block& gone = *of->block;
  shared_.erase(of);
  let_go(gone);
}

// ---- contents ----

void DeviceMemory::fill(void* address, unsigned char value, std::size_t bytes) {
  const Range range = range_of(address, bytes);
  Block& block = *machine_.blocks.find(range);
  if (machine_.stream.is_done(block)) {
    std::memset(address, value, bytes);
  } else {
    metal::fill(machine_, range, value);
  }
}

bool DeviceMemory::is_filled(const void* address, unsigned char value, std::size_t bytes) {
  const Block& block = *machine_.blocks.find(range_of(address, bytes));
  machine_.stream.wait_for(block.last_use);
  const auto* byte = static_cast<const unsigned char*>(address);
  return std::all_of(byte, byte + bytes, [=](unsigned char b) { return b == value; });
}

const char* DeviceMemory::advice() const {
  return "; the system lets the GPU use more of the memory with: sudo sysctl "
         "iogpu.wired_limit_mb=<MB>";
}

}  // namespace mlxtape::metal
