// What an encoder hands out: recorded work, contents of tensors that are on their way, and what it counts (core/encoder.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "mlxtape/core/buffer.h"

namespace mlxtape {

class Device;

struct EncoderCounters {
  std::uint64_t dispatches = 0;
  std::uint64_t commits = 0;
  std::uint64_t waits = 0;
};

// Kernels with their arguments and the memory they use, which stays theirs as long as the graph
// lives. The tensors' contents are what they are at each replay.
class Graph {
 public:
  virtual ~Graph() = default;
  std::size_t nodes() const { return nodes_; }
  Device& device() const { return *device_; }

 private:
  friend class CommandEncoder;
  Device* device_ = nullptr;
  std::size_t nodes_ = 0;
  std::vector<Buffer> memory_;
  std::vector<Storage*> writes_;  // what a replay writes, each once
};

// The contents of a tensor on their way to the host. The encoder need not outlive it, its device does.
class PendingDownload {
 public:
  virtual ~PendingDownload() = default;
  // Returns when they are there; they stay as long as this does.
  virtual const void* wait() = 0;
};

}  // namespace mlxtape
