// XXH64 with seed 0 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): finds what has changed by accident in bytes that were
// written, at the speed of memory. No protection from those who want to deceive.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace mlxtape {

class Checksum {
 public:
  void add(std::span<const std::byte> bytes);
  // Of everything so far; more may be added.
  std::uint64_t value() const;

 private:
  static constexpr std::size_t kStripe = 32;

  void add_stripe(const std::byte* stripe);

  std::array<std::uint64_t, 4> lanes_ = {0x60EA27EEADC0B5D6, 0xC2B2AE3D27D4EB4F, 0,
                                         0x61C8864E7A143579};
  std::array<std::byte, kStripe> rest_{};  // bytes that do not fill a stripe yet
  std::uint64_t length_ = 0;
};

}  // namespace mlxtape
