// Dispatch: one launch of a kernel as it is encoded, now or at each replay of a graph.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/metal/blocks.h"
#include "backends/metal/calls.h"

namespace mlxtape::metal {

// Buffers that a kernel can have; the last is for first_group.
constexpr unsigned long kMostBuffers = 31;
constexpr unsigned long kFirstGroupAt = 30;
constexpr std::size_t kMostBytes = 4096;  // of setBytes

// A kernel compiled for the device, with what may be launched of it.
struct Pipeline {
  Retained state;
  std::string name;  // of the function
  unsigned long max_threads = 0;
  unsigned long group_memory = 0;  // that the text declares
};

struct Dispatch {
  struct Binding {
    Block* block = nullptr;  // null: nothing, for a tensor without elements
    unsigned long offset = 0;
    unsigned long index = 0;
    unsigned long before = 0, after = 0;  // bytes of the tensor on both sides of offset
  };
  struct Bytes {
    unsigned long index = 0;
    std::vector<std::byte> value;
  };

  const Pipeline* pipeline = nullptr;
  const std::string* kernel = nullptr;  // its name in the registry
  std::vector<Binding> buffers;
  std::vector<Bytes> bytes;
  std::vector<Block*> tables;  // whose addresses are in bytes
  std::vector<Range> reads, writes;
  Size groups{1, 1, 1}, threads{1, 1, 1};
  unsigned long group_memory = 0;
  bool takes_first_group = false;  // groups may be launched in parts, along the first axis
  double seconds = 0;              // on the slowest device that is supported
};

}  // namespace mlxtape::metal
