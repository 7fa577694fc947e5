// Memory of a Metal device: buffers that the host and the GPU both see, at the host's addresses.
//
// Small blocks are cut from larger buffers: the system counts buffers, and each costs it microseconds. The host writes
// memory at once where the GPU has done with it, else a kernel writes it in the order of the work.
//
// Threads    Every member may be called from any thread at any time.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "backends/metal/machine.h"
#include "mlxtape/core/memory.h"

namespace mlxtape::metal {

class DeviceMemory final : public RawMemory {
 public:
  static constexpr std::size_t kSmall = std::size_t{64}
                                        << 10;  // bytes from which on a block has its own buffer
  static constexpr std::size_t kShared = std::size_t{4}
                                         << 20;  // of a buffer that small blocks are cut from

  explicit DeviceMemory(Machine& machine) : machine_(machine) {}

  void* allocate(std::size_t bytes, bool& is_zero) override;
  void release(void* address, std::size_t bytes) noexcept override;
  void fill(void* address, unsigned char value, std::size_t bytes) override;
  bool is_filled(const void* address, unsigned char value, std::size_t bytes) override;
  const char* advice() const override;

 private:
  // A buffer in pieces. What is free lies between those that are not.
  struct Shared {
    Block* block = nullptr;
    std::map<std::size_t, std::size_t> free;  // offset -> bytes
    bool is_unused() const { return free.size() == 1 && free.begin()->second == kShared; }
  };

  Block* new_block(std::size_t bytes);
  void let_go(Block& block);
  static void* cut(Shared& from, std::size_t bytes);
  void* allocate_small(std::size_t bytes);
  void release_small(void* address, std::size_t bytes);

  Machine& machine_;
  std::mutex mutex_;
  std::vector<Shared> shared_;
};

}  // namespace mlxtape::metal
