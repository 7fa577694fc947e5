// Copies between the host's memory and the device's. Both are the same memory, but a copy has its place in the order of the
// work: where the GPU may still use what would be written, it goes through memory of its own, and a kernel moves it.
//
// Threads    Every member may be called from any thread at any time.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/metal/machine.h"
#include "mlxtape/core/graph.h"

namespace mlxtape::metal {

// By kernels, in the order of the work.
void move(Machine& machine, const Range& from, const Range& to);
void fill(Machine& machine, const Range& range, unsigned char value);

class Uploads {
 public:
  explicit Uploads(Machine& machine) : machine_(machine) {}
  // When it returns, the host's memory may change.
  void copy(const void* host, void* to, std::size_t bytes);

 private:
  static constexpr std::size_t kPieceBytes = std::size_t{8} << 20;
  static constexpr std::size_t kPieces = 4;  // the host fills one while the GPU reads others
  Block& piece();

  Machine& machine_;
  std::mutex mutex_;
  std::array<Block*, kPieces> pieces_{};
  std::size_t current_ = 0, used_ = 0;
};

// Memory for downloads, kept for the next ones.
class Downloads {
 public:
  explicit Downloads(Machine& machine) : machine_(machine) {}
  // What is there at this place in the order of the work.
  std::unique_ptr<PendingDownload> begin(const void* from, std::size_t bytes);

 private:
  class Pending;
  Block& take(std::size_t bytes);
  void give_back(Block& block);
  static constexpr std::size_t kMostKept = 16;

  Machine& machine_;
  std::mutex mutex_;
  std::vector<Block*> free_;
};

}  // namespace mlxtape::metal
