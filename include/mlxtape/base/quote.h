// Text that comes from files and users, as a message may hold it: on one line, and without power over a terminal.
//
// Threads    any
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mlxtape {

inline constexpr std::size_t kShownBytes = 200;

// Control characters, and those that turn the direction of a line, as \n, \x1b, \u202e; bytes that are no UTF-8 as \xff.
// Those in `keep` (of ASCII) stay as they are.
std::string escaped(std::string_view text, std::string_view keep = {});

// The same; of a text that is longer than `most` bytes the beginning alone, and how long it is.
std::string shown(std::string_view text, std::size_t most = kShownBytes);

}  // namespace mlxtape
