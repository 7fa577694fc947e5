#include "backends/cuda/transfers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "mlxtape/base/checked.h"
#include "mlxtape/core/threads.h"

namespace mlxtape::cuda {

namespace {

// One thread does not fill memory as fast as the device reads it.
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

}  // namespace

PinnedMemory::PinnedMemory(std::size_t bytes) : bytes_(bytes) {
  check(cudaHostAlloc(&address_, bytes, cudaHostAllocDefault), "pinning memory of the host");
}

void Uploads::next_piece() {
  Piece& done = pieces_[current_];
  if (done.in_flight) check(cudaEventRecord(done.read->get(), stream_), "upload");
  current_ = (current_ + 1) % kPieces;
  used_ = 0;
  Piece& next = pieces_[current_];
  if (next.in_flight) check(cudaEventSynchronize(next.read->get()), "upload");
  next.in_flight = false;
}

void Uploads::copy(const void* host, void* to, std::size_t bytes, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const auto* from = static_cast<const char*>(host);
  auto* target = static_cast<char*>(to);
  while (bytes > 0) {
    if (used_ == kPieceBytes || (used_ > 0 && stream_ != stream)) next_piece();
    Piece& piece = pieces_[current_];
    if (!piece.memory) {
      piece.read = std::make_unique<Event>();
      piece.memory = std::make_unique<PinnedMemory>(kPieceBytes);
    }
    const std::size_t count = std::min(bytes, kPieceBytes - used_);
    char* pinned = piece.memory->data() + used_;
    copy_on_threads(from, pinned, count);
    check(cudaMemcpyAsync(target, pinned, count, cudaMemcpyHostToDevice, stream), "upload");
    piece.in_flight = true;
    stream_ = stream;
    used_ = std::min(kPieceBytes, (used_ + count + 255) / 256 * 256);
    from += count;
    target += count;
    bytes -= count;
  }
}

Downloads::Block Downloads::take(std::size_t bytes) {
  {
    const std::lock_guard lock(mutex_);
    const auto fits = std::find_if(free_.begin(), free_.end(), [&](const Block& block) {
      return block.memory->size() >= bytes;
    });
    if (fits != free_.end()) {
      Block block = std::move(*fits);
      free_.erase(fits);
      return block;
    }
  }
  constexpr std::size_t kLeast = 4096;
  return {std::make_unique<PinnedMemory>(std::max(bytes, kLeast)), std::make_unique<Event>()};
}

void Downloads::give_back(Block block) {
  const std::lock_guard lock(mutex_);
  if (free_.size() < kMostKept) free_.push_back(std::move(block));
}

}  // namespace mlxtape::cuda
