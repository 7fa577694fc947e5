// Residency: memory that stays wired for the GPU between command buffers, on systems that have sets for it (macOS 15).
//
// Only large blocks are in the set, and it changes at most once per command buffer: sets that change at every allocation
// have crashed drivers and systems.
//
// Threads    One at a time: the stream has the lock. collect and forget may be called from any thread.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "backends/metal/blocks.h"
#include "backends/metal/objc.h"

namespace mlxtape::metal {

class Residency {
 public:
  static constexpr std::size_t kLeast = std::size_t{4} << 20;  // bytes of a block in the set

  // Without a set nothing is ever resident, and every use of an address must name its buffer.
  void start(Id device, Id queue);
  void set_on(bool on);

  void collect(Block& block);  // the set has it from the next command buffer on
  void forget(Block& block);   // which is about to go
  void update();               // before a command buffer is handed over

 private:
  std::mutex mutex_;
  Retained set_;
  bool on_ = true;
  bool changed_ = false;
  std::vector<Block*> all_;      // in the set
  std::vector<Block*> waiting_;  // to be
};

}  // namespace mlxtape::metal
