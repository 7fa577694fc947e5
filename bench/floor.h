// The floor: a bare loop over arrays, no arithmetic to speak of.
#pragma once

#include <cstdint>
#include <vector>

#include "mlxtape/core/device.h"

namespace mlxtape::bench {

// One task's part of one array.
struct FloorPart {
  float* at;
  std::int64_t vectors;
};

// Reads read_bytes from read_streams arrays and writes write_bytes to write_streams arrays, all
// walked side by side by every thread; written past the cache when ops would (tasks.h).
class Floor {
 public:
  Floor(Device& device, std::int64_t read_bytes, int read_streams, std::int64_t write_bytes,
        int write_streams);
  void run() const;

 private:
  std::vector<Tensor> reads_, writes_;
};

}  // namespace mlxtape::bench
