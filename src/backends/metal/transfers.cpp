#include "backends/metal/transfers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/memory_kernels.h"
#include "mlxtape/base/checked.h"
#include "mlxtape/base/error.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::metal {

namespace {

// A kernel of ours outside of any encoder's dispatch.
template <class Args>
void run(Machine& machine, const Kernel& kernel, const Args& args, std::vector<Range> in,
         std::vector<Range> out) {
  Target target{&machine, &kernel.name, std::move(in), std::move(out), {}, nullptr};
  std::vector<void*> addresses;
  for (const auto* list : {&target.in, &target.out}) {
    for (const Range& range : *list) addresses.push_back(const_cast<char*>(range.begin));
  }
  KernelCall call;
  call.in = {addresses.data(), target.in.size()};
  call.out = {addresses.data() + target.in.size(), target.out.size()};
  call.args = &args;
  call.args_bytes = sizeof args;
  call.queue = &target;
  kernel.fn(call);
}

// One thread does not write memory as fast as there is bandwidth for.
void copy_on_threads(const char* from, char* to, std::size_t bytes) {
  constexpr std::int64_t kEach = std::int64_t{512} << 10;
  const auto all = static_cast<std::int64_t>(bytes);
  if (all <= kEach) {
    std::memcpy(to, from, bytes);
    return;
  }
  parallel_for(ceil_div(all, kEach), [&](std::int64_t task) {
    const std::int64_t start = task * kEach;
    std::memcpy(to + start, from + start, static_cast<std::size_t>(std::min(kEach, all - start)));
  });
}

Block& new_block(Machine& machine, std::size_t bytes) {
  const AutoreleasePool pool;
  Retained buffer = new_buffer(machine.device.get(), bytes);
  if (!buffer) {
    throw Error(Errc::kOutOfMemory, "metal: copies need memory of their own, got none for " +
                                        std::to_string(bytes) + " bytes");
  }
  const auto* begin = static_cast<const char*>(contents(buffer.get()));
  return machine.blocks.add({begin, begin + bytes}, std::move(buffer));
}

}  // namespace

void move(Machine& machine, const Range& from, const Range& to) {
  static const Kernel& kernel = KernelRegistry::instance().find(Backend::kMetal, "move_u8");
  run(machine, kernel, BytesArgs{static_cast<std::uint64_t>(to.end - to.begin)}, {from}, {to});
}

void fill(Machine& machine, const Range& range, unsigned char value) {
  static const Kernel& kernel = KernelRegistry::instance().find(Backend::kMetal, "fill_u8");
  run(machine, kernel, FillArgs{range.end - range.begin, value}, {}, {range});
}

// ---- uploads ----

// The piece that has room, and nothing in it that the GPU has yet to read.
Block& Uploads::piece() {
  if (used_ == kPieceBytes) {
    current_ = (current_ + 1) % kPieces;
    used_ = 0;
  }
  Block*& block = pieces_[current_];
  if (block == nullptr) block = &new_block(machine_, kPieceBytes);
  if (used_ == 0) machine_.stream.wait_for(block->last_use);
  return *block;
}

void Uploads::copy(const void* host, void* to, std::size_t bytes) {
  const auto* from = static_cast<const char*>(host);
  auto* target = static_cast<char*>(to);
  const Block* block = machine_.blocks.find({target, target + bytes});
  if (block == nullptr) {
    throw Error(Errc::kDevice,
                "upload: the tensor's memory must be the device's, got other memory");
  }
  machine_.stream.check();
  if (machine_.stream.is_done(*block)) return copy_on_threads(from, target, bytes);
  const std::lock_guard lock(mutex_);
  while (bytes > 0) {
    const Block& through = piece();
    const std::size_t count = std::min(bytes, kPieceBytes - used_);
    char* room = const_cast<char*>(through.range.begin) + used_;
    copy_on_threads(from, room, count);
    move(machine_, {room, room + count}, {target, target + count});
    used_ = std::min(kPieceBytes, (used_ + count + 255) / 256 * 256);
    from += count;
    target += count;
    bytes -= count;
  }
}

// ---- downloads ----

class Downloads::Pending final : public PendingDownload {
 public:
  Pending(Downloads& owner, std::size_t bytes) : owner_(owner), block_(owner.take(bytes)) {}
  ~Pending() override { owner_.give_back(block_); }
  void start(const Range& from) {
    const char* begin = block_.range.begin;
    move(owner_.machine_, from, {begin, begin + (from.end - from.begin)});
    number_ = block_.last_use;
    owner_.machine_.stream.commit();
  }
  const void* wait() override {
    owner_.machine_.stream.wait_for(number_);
    return block_.range.begin;
  }

 private:
  Downloads& owner_;
  Block& block_;
  std::uint64_t number_ = 0;  // of the command buffer that writes it
};

std::unique_ptr<PendingDownload> Downloads::begin(const void* from, std::size_t bytes) {
  auto pending = std::make_unique<Pending>(*this, bytes);
  const auto* begin = static_cast<const char*>(from);
  if (bytes != 0) pending->start({begin, begin + bytes});
  return pending;
}

Block& Downloads::take(std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto fits = std::find_if(free_.begin(), free_.end(), [&](const Block* block) {
      return block->range.end - block->range.begin >= static_cast<std::ptrdiff_t>(bytes);
    });
    if (fits != free_.end()) {
      Block* block = *fits;
      free_.erase(fits);
      return *block;
    }
  }
  constexpr std::size_t kLeast = 4096;
  return new_block(machine_, std::max(bytes, kLeast));
}

void Downloads::give_back(Block& block) {
  const std::lock_guard lock(mutex_);
  if (free_.size() < kMostKept) {
    free_.push_back(&block);
  } else {
    machine_.stream.bury(machine_.blocks.remove(block));
  }
}

}  // namespace mlxtape::metal
