#include "mlxtape/core/memory.h"

#include <array>
#include <atomic>
#include <bit>
#include <mutex>
#include <string>

#include "mlxtape/base/error.h"
#include "mlxtape/core/arena.h"
#include "mlxtape/core/device.h"

namespace mlxtape {

namespace {

constexpr std::size_t kUnit = 64;
constexpr std::size_t kStepsPerOctave = 8;
constexpr std::size_t kBins = 64 * kStepsPerOctave;
constexpr std::size_t kNoBin = kBins;  // of a block that is never kept
constexpr std::size_t kLargest = std::size_t{1} << 62U;
constexpr std::size_t kGuard = 256;  // bytes on each side; a multiple of the alignment
constexpr unsigned char kGuardValue = 0xA5;
constexpr unsigned char kPoison = 0xFF;

struct SizeClass {
  std::size_t bin;
  std::size_t bytes;
};

// The smallest (8 + j)/8 · 2^e that holds bytes, its bin numbers (e, j); up to 8 units of 64
// bytes, a multiple of the unit.
SizeClass size_class(std::size_t bytes) {
  if (bytes <= kUnit * kStepsPerOctave) {
    const std::size_t units = (bytes + kUnit - 1) / kUnit;
    return {units - 1, units * kUnit};
  }
  const auto octave = static_cast<std::size_t>(std::bit_width(bytes - 1)) - 1;
  const std::size_t step = (std::size_t{1} << octave) / kStepsPerOctave;
  const std::size_t steps = (bytes + step - 1) / step;  // 9 to 16
  return {octave * kStepsPerOctave + (steps - kStepsPerOctave - 1), steps * step};
}

SizeClass exact(std::size_t bytes) { return {kNoBin, (bytes + kUnit - 1) / kUnit * kUnit}; }

std::string with_units(std::size_t bytes) { return std::to_string(bytes) + " bytes"; }

}  // namespace

struct MemoryPool::Impl {
  Device* device;
  std::unique_ptr<RawMemory> raw;
  mutable std::mutex mutex;
  MemoryStats stats;
  std::array<Storage*, kBins> bins{};

  std::atomic<bool> guarded = false;
  std::string broken;  // the first guard band found overwritten

  // A Storage must find its pool without a field of its own: it sits first in a Block.
  struct Block : Storage {
    Arena::Note note;  // of the arena's step that it was made in
    Impl* pool = nullptr;
    std::size_t bin = 0;
    std::size_t guard = 0;    // bytes before address; as many or more after the extent
    Block* in_use = nullptr;  // guarded blocks that are out, for check_guards
  };
  Block* guarded_in_use = nullptr;

  static void give_back(Storage* storage) noexcept {
    auto* block = static_cast<Block*>(storage);
    Impl& self = *block->pool;
    if (block->note.arena) {
      Arena::ended(block->note);
      block->note.arena.reset();
    }
    const std::lock_guard lock(self.mutex);
    self.stats.current -= block->capacity;
    if (block->guard != 0) {
      try {
        self.inspect(*block);
      } catch (const std::exception& e) {  // the device has failed: nothing can be read from it
        if (self.broken.empty()) self.broken = e.what();
      }
      Block** link = &self.guarded_in_use;
      while (*link != block) link = &(*link)->in_use;
      *link = block->in_use;
    }
    const bool of_other_mode = (block->guard != 0) != self.guarded;
    if (of_other_mode || block->bin == kNoBin) {  // of no use to others
      self.free_block(block);
      return;
    }
    block->next = std::exchange(self.bins[block->bin], block);
    self.stats.cached += block->capacity;
  }

  // A block's guard bands are closed while it is out: its own extent is not.
  void close_guards(const Block& block) noexcept {
    const auto* start = static_cast<const char*>(block.address);
    raw->close(start - block.guard, block.guard);
    raw->close(start + block.bytes, block.capacity - block.guard - block.bytes);
  }

  // Leaves the guard bands open.
  void inspect(const Block& block) {
    const auto* base = static_cast<const char*>(block.address) - block.guard;
    const std::size_t after = block.capacity - block.guard - block.bytes;
    raw->open(base, block.capacity);
    const char* side = nullptr;
    if (!raw->is_filled(base, kGuardValue, block.guard)) side = "before the start";
    if (!raw->is_filled(base + block.guard + block.bytes, kGuardValue, after)) {
      side = "after the end";
    }
    if (side != nullptr && broken.empty()) {
      broken = "memory: nothing may write outside a tensor, got a write " + std::string(side) +
               " of a block of " + with_units(block.bytes);
    }
  }

  void free_block(Block* block) noexcept {
    raw->release(static_cast<char*>(block->address) - block->guard, block->capacity);
    delete block;
  }

  void free_cached() noexcept {
    for (Storage*& head : bins) {
      while (head != nullptr) {
        auto* block = static_cast<Block*>(head);
        head = block->next;
        free_block(block);
      }
    }
    stats.cached = 0;
  }

  Block* fresh(const SizeClass& wanted, std::size_t asked) {
    const auto over_limit = [&] {
      return stats.limit != 0 && stats.current + stats.cached + wanted.bytes > stats.limit;
    };
    if (over_limit()) free_cached();
    if (over_limit()) {
      throw Error(Errc::kOutOfMemory,
                  "memory: " + device->name() + " may use " + with_units(stats.limit) + " and " +
                      with_units(stats.current) + " are in use, got a request for " +
                      with_units(asked) + "; free tensors or raise the limit" + raw->advice());
    }
    auto block = std::make_unique<Block>();
    block->address = raw->allocate(wanted.bytes, block->is_zero);
    if (block->address == nullptr) {
      free_cached();
      block->address = raw->allocate(wanted.bytes, block->is_zero);
    }
    if (block->address == nullptr) {
      throw Error(Errc::kOutOfMemory, "memory: " + device->name() + " has no room for " +
                                          with_units(asked) + "; " + with_units(stats.current) +
                                          " are in use" + raw->advice());
    }
    block->guard = guarded ? kGuard : 0;
    block->address = static_cast<char*>(block->address) + block->guard;
    block->capacity = wanted.bytes;
    block->device = device;
    block->release = give_back;
    block->pool = this;
    block->bin = wanted.bin;
    ++stats.allocations;
    return block.release();
  }

  Block* take(std::size_t bytes, SizeClass (*rounded)(std::size_t) = size_class) {
    if (bytes == 0) throw Error(Errc::kArgument, "memory: at least one byte, got 0");
    if (bytes > kLargest) {
      throw Error(Errc::kOutOfMemory, "memory: at most 2^62 bytes, got " + with_units(bytes));
    }
    const std::lock_guard lock(mutex);
    const SizeClass wanted = rounded(bytes + (guarded ? 2 * kGuard : 0));
    auto* block = wanted.bin == kNoBin ? nullptr : static_cast<Block*>(bins[wanted.bin]);
    if (block != nullptr) {
      bins[wanted.bin] = block->next;
      block->next = nullptr;
      stats.cached -= block->capacity;
      ++stats.reuses;
    } else {
      block = fresh(wanted, bytes);
    }
    block->bytes = bytes;
    if (guarded) {
      auto* base = static_cast<char*>(block->address) - block->guard;
      try {
        raw->fill(base, kGuardValue, block->capacity);
        raw->fill(block->address, kPoison, bytes);
      } catch (...) {
        free_block(block);
        throw;
      }
      block->is_zero = false;
      block->in_use = std::exchange(guarded_in_use, block);
      close_guards(*block);
    }
    stats.current += block->capacity;
    stats.peak = std::max(stats.peak, stats.current);
    return block;
  }
};

MemoryPool::MemoryPool(Device& device, std::unique_ptr<RawMemory> raw)
    : impl_(std::make_unique<Impl>()) {
  impl_->device = &device;
  impl_->raw = std::move(raw);
}

MemoryPool::~MemoryPool() { impl_->free_cached(); }

Buffer MemoryPool::allocate(std::size_t bytes) {
  if (Buffer placed = impl_->guarded ? Buffer() : Arena::place(*this, bytes)) return placed;
  Impl::Block* block = impl_->take(bytes);
  block->is_zero = false;
  Buffer buffer(block);
  if (!impl_->guarded) Arena::note(*this, bytes, block->note);
  return buffer;
}

Buffer MemoryPool::allocate_zeroed(std::size_t bytes) {
  if (Buffer placed = impl_->guarded ? Buffer() : Arena::place(*this, bytes)) {
    if (!Arena::rehearses(*this)) impl_->raw->fill(placed.address(), 0, bytes);
    return placed;
  }
  Impl::Block* block = impl_->take(bytes);
  Buffer buffer(block);
  if (!impl_->guarded) Arena::note(*this, bytes, block->note);
  if (!std::exchange(block->is_zero, false)) impl_->raw->fill(block->address, 0, bytes);
  return buffer;
}

Buffer MemoryPool::allocate_exact(std::size_t bytes) {
  Impl::Block* block = impl_->take(bytes, exact);
  block->is_zero = false;
  return Buffer(block);
}

Device& MemoryPool::device() const { return *impl_->device; }

MemoryStats MemoryPool::stats() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->stats;
}

void MemoryPool::set_limit(std::size_t bytes) {
  const std::lock_guard lock(impl_->mutex);
  impl_->stats.limit = bytes;
  // What is cached could otherwise be given out beyond the limit.
  if (bytes != 0 && impl_->stats.current + impl_->stats.cached > bytes) impl_->free_cached();
}

void MemoryPool::reset_peak() {
  const std::lock_guard lock(impl_->mutex);
  impl_->stats.peak = impl_->stats.current;
}

void MemoryPool::trim() {
  const std::lock_guard lock(impl_->mutex);
  impl_->free_cached();
}

void MemoryPool::set_guarded(bool on) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->guarded == on) return;
  impl_->guarded = on;
  impl_->free_cached();
}

bool MemoryPool::is_guarded() const { return impl_->guarded; }

void MemoryPool::check_guards() {
  const std::lock_guard lock(impl_->mutex);
  for (Impl::Block* b = impl_->guarded_in_use; b != nullptr; b = b->in_use) {
    impl_->inspect(*b);
    impl_->close_guards(*b);
  }
  if (!impl_->broken.empty()) throw Error(Errc::kBackend, std::exchange(impl_->broken, {}));
}

namespace {

struct ForeignStorage : Storage {
  std::function<void()> done;

  static void let_go(Storage* storage) noexcept {
    auto* self = static_cast<ForeignStorage*>(storage);
    if (self->done) self->done();
    delete self;
  }
};

}  // namespace

Buffer Buffer::wrap(Device& device, void* address, std::size_t bytes, std::function<void()> done) {
  if (address == nullptr && bytes != 0) {
    throw Error(Errc::kArgument, "buffer: foreign memory must have an address, got null");
  }
  auto* storage = new ForeignStorage;
  storage->address = address;
  storage->bytes = storage->capacity = bytes;
  storage->device = &device;
  storage->is_foreign = true;
  storage->release = ForeignStorage::let_go;
  storage->done = std::move(done);
  return Buffer(storage);
}

}  // namespace mlxtape
