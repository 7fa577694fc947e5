// Copies between the host's memory and the device's for which the host does not wait: through pinned memory, which the
// device reads and writes on its own.
//
// Threads    Every member may be called from any thread at any time.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/cuda/error.h"

namespace mlxtape::cuda {

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDisableTiming) {
    check(cudaEventCreateWithFlags(&event_, flags), "making an event");
  }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class PinnedMemory {
 public:
  explicit PinnedMemory(std::size_t bytes);
  ~PinnedMemory() { cudaFreeHost(address_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  char* data() const { return static_cast<char*>(address_); }
  std::size_t size() const { return bytes_; }

 private:
  void* address_ = nullptr;
  std::size_t bytes_;
};

// Uploads through a few pieces of pinned memory, used one after the other: while the device reads one, the host fills the
// next. Small uploads share a piece, so that a step's numbers go without a wait.
class Uploads {
 public:
  // In the order of the stream. When it returns, the host's memory may change.
  void copy(const void* host, void* to, std::size_t bytes, cudaStream_t stream);

 private:
  // Two would do for the overlap; more let the host run ahead of a busy stream. On an H200's host 8 MiB are filled in
  // about as long as 8 launches take.
  static constexpr std::size_t kPieceBytes = std::size_t{8} << 20;
  static constexpr std::size_t kPieces = 4;
  struct Piece {
    std::unique_ptr<PinnedMemory> memory;
    std::unique_ptr<Event> read;  // by the device, up to here
    bool in_flight = false;
  };
  void next_piece();

  std::mutex mutex_;
  std::array<Piece, kPieces> pieces_;
  std::size_t current_ = 0, used_ = 0;
  cudaStream_t stream_ = nullptr;  // of what is in the current piece
};

// Pinned memory for downloads, kept for the next ones.
class Downloads {
 public:
  struct Block {
    std::unique_ptr<PinnedMemory> memory;
    std::unique_ptr<Event> written;
  };
  Block take(std::size_t bytes);
  void give_back(Block block);

 private:
  static constexpr std::size_t kMostKept = 16;

  std::mutex mutex_;
  std::vector<Block> free_;
};

}  // namespace mlxtape::cuda
