#include "backends/metal/residency.h"

#include <algorithm>

#include "backends/metal/calls.h"

namespace mlxtape::metal {

void Residency::start(Id device, Id queue) {
  const Retained descriptor = make("MTLResidencySetDescriptor");
  if (!descriptor) return;
  Id error = nullptr;
  set_ = new_residency_set(device, descriptor.get(), &error);
  // Refused, it is as on a system without: buffers are named at each use.
  if (set_) add_residency_set(queue, set_.get());
}

void Residency::set_on(bool on) {
  const std::lock_guard lock(mutex_);
  if (on == on_) return;
  on_ = on;
  if (on) return;
  for (Block* block : all_) {
    remove_allocation(set_.get(), block->buffer.get());
    block->is_resident = false;
  }
  changed_ = changed_ || !all_.empty();
  all_.clear();
  waiting_.clear();
}

void Residency::collect(Block& block) {
  const std::lock_guard lock(mutex_);
  if (!set_ || !on_ || block.range.end - block.range.begin < static_cast<std::ptrdiff_t>(kLeast))
    return;
  waiting_.push_back(&block);
}

void Residency::forget(Block& block) {
  const std::lock_guard lock(mutex_);
  waiting_.erase(std::remove(waiting_.begin(), waiting_.end(), &block), waiting_.end());
  if (!block.is_resident) return;
  all_.erase(std::remove(all_.begin(), all_.end(), &block), all_.end());
  remove_allocation(set_.get(), block.buffer.get());
  block.is_resident = false;
  changed_ = true;
}

void Residency::update() {
  const std::lock_guard lock(mutex_);
  if (!set_ || (waiting_.empty() && !changed_)) return;
  for (Block* block : waiting_) {
    add_allocation(set_.get(), block->buffer.get());
    block->is_resident = true;
    all_.push_back(block);
  }
  waiting_.clear();
  changed_ = false;
  commit(set_.get());
  request_residency(set_.get());
}

}  // namespace mlxtape::metal
