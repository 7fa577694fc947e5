// MemoryPool: gives out device memory, keeps what comes back, and counts.
//
// Sizes are rounded up to one of 8 steps per power of two (at most 12.5 % more than asked, from
// 64 bytes), so that a block serves any request of its step. Blocks are aligned to 64 bytes,
// large ones to 2 MiB.
//
// Threads    Every member may be called from any thread at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mlxtape/core/buffer.h"

namespace mlxtape {

// Where a pool gets its memory. allocate returns null when the system has none left.
class RawMemory {
 public:
  virtual ~RawMemory() = default;
  virtual void* allocate(std::size_t bytes, bool& is_zero) = 0;
  virtual void release(void* address, std::size_t bytes) noexcept = 0;
  virtual void fill(void* address, unsigned char value, std::size_t bytes) = 0;
  virtual bool is_filled(const void* address, unsigned char value, std::size_t bytes) = 0;
  // What else can be done where there is no more: the end of a sentence, or nothing.
  virtual const char* advice() const { return ""; }
  // Under a sanitizer that can watch this memory, an access to what is closed ends the process.
  virtual void close(const void* /*address*/, std::size_t /*bytes*/) noexcept {}
  virtual void open(const void* /*address*/, std::size_t /*bytes*/) noexcept {}
};

struct MemoryStats {
  std::size_t current = 0;        // bytes in use
  std::size_t peak = 0;           // the most that current has been since reset_peak
  std::size_t cached = 0;         // bytes kept for reuse
  std::size_t limit = 0;          // current + cached stays at or under it; 0 = no limit
  std::uint64_t allocations = 0;  // blocks taken from the system
  std::uint64_t reuses = 0;       // requests served from the cache
};

class MemoryPool {
 public:
  MemoryPool(Device& device, std::unique_ptr<RawMemory> raw);
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // At least one byte. Throws kOutOfMemory when the limit or the system says no; what was
  // allocated before stays usable. The cache is given back to the system before it says no.
  Buffer allocate(std::size_t bytes);         // contents undefined
  Buffer allocate_zeroed(std::size_t bytes);  // every byte 0, also when the block is used again
  // Without rounding up, for what stays: such a block goes back to the system, not to the cache. Arenas do not plan it.
  Buffer allocate_exact(std::size_t bytes);

  Device& device() const;
  MemoryStats stats() const;
  void set_limit(std::size_t bytes);  // 0 = no limit; applies to what is allocated from now on
  void reset_peak();
  void trim();  // give every cached block back to the system

  // Finds kernels that write outside their tensors or read what nobody wrote: every block given
  // out from now on lies between guard bands, and starts filled with 0xFF (NaN for floats).
  // Bands are checked when a block comes back and by check_guards, which throws kBackend if any
  // was ever found broken since the last call. For tests: it costs a fill per allocation.
  void set_guarded(bool on);
  bool is_guarded() const;
  void check_guards();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace mlxtape
