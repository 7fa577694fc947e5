// May a kernel start while the one before it ends (device/launch.cuh)? For the whole process.
#pragma once

#include <atomic>

namespace mlxtape::cuda {

inline std::atomic<bool>& overlap_flag() {
  static std::atomic<bool> on{true};
  return on;
}
inline bool overlap() { return overlap_flag().load(std::memory_order_relaxed); }
inline void set_overlap(bool on) { overlap_flag().store(on, std::memory_order_relaxed); }

}  // namespace mlxtape::cuda
