// TapeReport: which op holds how much memory for the way back.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace mlxtape {

// What the tape holds, by op; distinct memory counts once, for the op that saved it first.
struct TapeReport {
  struct Row {
    std::string name;
    std::size_t nodes = 0;
    std::size_t bytes = 0;
  };
  std::vector<Row> rows;  // largest first
  std::size_t saved_bytes = 0;
  std::size_t grad_bytes = 0;
  std::size_t peak_bytes = 0;  // of the device's memory since MemoryPool::reset_peak
};
std::string to_string(const TapeReport& report);  // a table

}  // namespace mlxtape
