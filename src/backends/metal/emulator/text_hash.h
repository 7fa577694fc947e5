#pragma once

#include <cstdint>
#include <string_view>

namespace mlxtape::emulator {

// FNV-1a: which text bound kernels were made from, and which one a library is asked of.
constexpr std::uint64_t text_hash(std::string_view text) {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3U;
  return hash;
}

}  // namespace mlxtape::emulator
