// Buffer: a piece of device memory with shared ownership. Copying a Buffer copies a pointer;
// the memory goes back to its pool (or its foreign owner) with the last copy.
//
// Threads    Copies of one Buffer may be made, used and dropped on any threads at once; a single
//            Buffer object is like a shared_ptr: not assigned on one thread while read on another.
//            The bytes behind it are the caller's to order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

namespace mlxtape {

class Device;

// The shared part of a Buffer. Pools keep it together with its memory and use it again, so that
// a tensor made in a loop costs no heap allocation.
struct Storage {
  std::atomic<std::size_t> owners{0};
  std::atomic<std::uint32_t> version{0};  // how often a device was told to write it
  void* address = nullptr;
  std::size_t bytes = 0;     // what was asked for: the extent that views are checked against
  std::size_t capacity = 0;  // what is really there
  Device* device = nullptr;
  void (*release)(Storage*) noexcept = nullptr;  // called when the last owner leaves
  bool is_zero = false;                          // fresh from the system, never handed out
  bool is_foreign = false;                       // wrapped: not ours to write into unasked
  Storage* next = nullptr;                       // the pool's list of cached blocks
  Storage* backing = nullptr;                    // what this is a part of: an arena's memory
};

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(Storage* storage) : storage_(storage) { share(); }
  Buffer(const Buffer& other) : storage_(other.storage_) { share(); }
  Buffer(Buffer&& other) noexcept : storage_(std::exchange(other.storage_, nullptr)) {}
  Buffer& operator=(Buffer other) noexcept {
    std::swap(storage_, other.storage_);
    return *this;
  }
  ~Buffer() { leave(); }

  // Memory that somebody else owns, used in place. done is called once, when the last copy goes;
  // it must not throw. Work that a device still has to do with the memory is the caller's to wait for
  // before that. Where wrap itself throws, done is not called and the memory stays the
  // caller's. 0 bytes need no address.
  static Buffer wrap(Device& device, void* address, std::size_t bytes,
                     std::function<void()> done = {});

  void* address() const { return storage_ == nullptr ? nullptr : storage_->address; }
  std::size_t bytes() const { return storage_ == nullptr ? 0 : storage_->bytes; }
  Device* device() const { return storage_ == nullptr ? nullptr : storage_->device; }
  std::size_t owners() const { return storage_ == nullptr ? 0 : storage_->owners.load(); }
  bool is_foreign() const { return storage_ != nullptr && storage_->is_foreign; }
  Storage* storage() const { return storage_; }
  // What must live for the bytes to be there.
  Buffer backing() const {
    return storage_ != nullptr && storage_->backing != nullptr ? Buffer(storage_->backing) : *this;
  }

  // Tells memory that was written from memory that was not. What the host writes in place does not count.
  std::uint32_t version() const {
    return storage_ == nullptr ? 0 : storage_->version.load(std::memory_order_relaxed);
  }
  void note_write() const {
    if (storage_ != nullptr) storage_->version.fetch_add(1, std::memory_order_relaxed);
  }
  explicit operator bool() const { return storage_ != nullptr; }

 private:
  void share() {
    if (storage_ != nullptr) storage_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  void leave() {
    if (storage_ != nullptr && storage_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      storage_->release(storage_);
    }
  }

  Storage* storage_ = nullptr;
};

}  // namespace mlxtape
