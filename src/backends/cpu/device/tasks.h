// How CPU kernels cut their work. Both answers depend on the shape alone, so results do not
// depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "mlxtape/base/checked.h"
#include "mlxtape/base/error.h"

namespace mlxtape::cpu {

// Output at least this large is written past the cache: it would not stay there until the next op
// reads it, and a streaming store spares reading the line first (a third to a half of the traffic).
inline constexpr std::int64_t kStreamBytes = std::int64_t{4} << 20;

// A task of this many bytes takes about 5 us: 20 times a fork-join, and short enough that two
// threads finish within a few per cent of each other.
inline constexpr std::int64_t kTaskBytes = std::int64_t{64} << 10;

// Rows per task when each row moves row_bytes in all.
inline std::int64_t rows_per_task(std::int64_t row_bytes) {
  return std::max<std::int64_t>(1, kTaskBytes / std::max<std::int64_t>(row_bytes, 1));
}

// Memory of this thread for the length of one task, aligned to 64 bytes; contents undefined. Kept
// and used again, so only a larger request than ever before on this thread allocates.
inline float* thread_scratch(std::int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local std::int64_t room = 0;
  if (floats > room) {
    room = ceil_div(floats, 1024) * 1024;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<std::size_t>(room) * 4)));
    if (!memory) {
      room = 0;
      throw Error(Errc::kOutOfMemory,
                  "memory: no room for " + std::to_string(floats) + " floats of scratch");
    }
  }
  return memory.get();
}

}  // namespace mlxtape::cpu
