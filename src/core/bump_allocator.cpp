#include "mlxtape/core/bump_allocator.h"

#include <algorithm>
#include <memory>

namespace mlxtape {

namespace {

constexpr std::size_t kAlign = 256;  // what the devices' own allocations have

std::size_t padded(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// A part of a block, which it keeps.
struct PartStorage : Storage {
  Buffer block;

  static void let_go(Storage* storage) noexcept { delete static_cast<PartStorage*>(storage); }
};

}  // namespace

void BumpAllocator::expect(std::size_t bytes) {
  if (bytes <= kOwnBlock) expected_ += padded(bytes);
}

void BumpAllocator::forget(std::size_t bytes) {
  if (bytes <= kOwnBlock) expected_ -= std::min(expected_, padded(bytes));
}

Buffer BumpAllocator::take(std::size_t bytes) {
  MemoryPool& pool = device_->memory();
  if (bytes > kOwnBlock || pool.is_guarded()) return pool.allocate_exact(bytes);
  const std::size_t room = padded(bytes);
  if (!block_ || block_.bytes() - used_ < room) {
    block_ = pool.allocate_exact(std::max(room, std::min(kBlock, expected_)));
    used_ = 0;
  }
  auto part = std::make_unique<PartStorage>();
  part->address = static_cast<char*>(block_.address()) + used_;
  part->bytes = part->capacity = bytes;
  part->device = device_;
  part->backing = block_.storage();
  part->block = block_;
  part->release = PartStorage::let_go;
  used_ += room;
  expected_ -= std::min(expected_, room);
  return Buffer(part.release());
}

Tensor BumpAllocator::empty(const Shape& shape, DType dtype) {
  const std::size_t bytes = Tensor::meta(shape, dtype).bytes();
  return {take(std::max<std::size_t>(bytes, 1)), dtype, shape};
}

}  // namespace mlxtape
