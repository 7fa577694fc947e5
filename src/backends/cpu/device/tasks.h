// How CPU kernels cut their work. Both answers depend on the shape alone, so results do not
// depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "mlxtape/base/checked.h"

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

}  // namespace mlxtape::cpu
