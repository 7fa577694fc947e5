// Machine: the parts of one Metal device, as its memory, its encoders and its launches share them.
#pragma once

#include "backends/metal/blocks.h"
#include "backends/metal/library.h"
#include "backends/metal/stream.h"

namespace mlxtape::metal {

struct Machine {
  // modern: macOS 15, which has residency sets and math modes.
  Machine(Id found, bool modern)
      : device(Retained::share(found)), library(found, modern), stream(found, modern) {}
  Retained device;
  Blocks blocks;
  Library library;
  Stream stream;
};

// What KernelCall::queue points to: where a kernel's launches go, and the bytes behind the call's addresses.
struct Target {
  Machine* machine = nullptr;
  const std::string* kernel = nullptr;  // its name in the registry
  std::vector<Range> in, out;           // as in the call; empty where the address is null
  Range workspace;
  std::vector<Dispatch>* recording = nullptr;  // null: the stream
};

}  // namespace mlxtape::metal
