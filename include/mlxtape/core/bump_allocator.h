// BumpAllocator: memory for tensors that come together and stay, such as a model's weights. They lie one behind the other in
// blocks of exactly the bytes they need, where the pool rounds each of them up by as much as 12.5 %.
//
//   BumpAllocator memory(device);
//   for (...) memory.expect(bytes);                    // first all sizes,
//   const Tensor w = memory.empty({4096, 1024}, type);  // then the tensors, in any order
//
// Tensors over kOwnBlock have a block each. The others share blocks of at most kBlock, so that a block, which goes back to
// the system with its last tensor, never keeps much memory for the sake of a little. Each tensor counts its own owners and
// writes. With guarded memory (MemoryPool::set_guarded) every tensor is an allocation of its own.
//
// Threads    One at a time; the tensors are like any others.
#pragma once

#include <cstddef>

#include "mlxtape/core/device.h"

namespace mlxtape {

class BumpAllocator {
 public:
  static constexpr std::size_t kBlock = std::size_t{256} << 20;
  static constexpr std::size_t kOwnBlock = std::size_t{4} << 20;

  explicit BumpAllocator(Device& device) : device_(&device) {}

  void expect(std::size_t bytes);                 // of one tensor
  void forget(std::size_t bytes);                 // of one that was expected and will not come
  Tensor empty(const Shape& shape, DType dtype);  // contents undefined

 private:
  Buffer take(std::size_t bytes);

  Device* device_;
  Buffer block_;
  std::size_t used_ = 0;      // of block_
  std::size_t expected_ = 0;  // that will share blocks, and have no memory yet
};

}  // namespace mlxtape
