// Counts the program's heap allocations (operator new is replaced), to show that a call makes none.
#pragma once

#include <cstdint>

namespace mlxtape::bench {

std::uint64_t allocations();  // since the start, on every thread

}  // namespace mlxtape::bench
