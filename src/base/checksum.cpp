#include "mlxtape/base/checksum.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace mlxtape {

namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F,
                        kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63,
                        kPrime5 = 0x27D4EB2F165667C5;

template <class Word>
std::uint64_t word_at(const std::byte* bytes) {
  Word word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

std::uint64_t round_of(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

}  // namespace

void Checksum::add_stripe(const std::byte* stripe) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i] = round_of(lanes_[i], word_at<std::uint64_t>(stripe + 8 * i));
  }
}

void Checksum::add(std::span<const std::byte> bytes) {
  const std::size_t held = length_ % kStripe;
  length_ += bytes.size();
  if (held > 0) {
    const std::size_t more = std::min(bytes.size(), kStripe - held);
    std::copy_n(bytes.begin(), more, rest_.begin() + static_cast<std::ptrdiff_t>(held));
    bytes = bytes.subspan(more);
    if (held + more < kStripe) return;
    add_stripe(rest_.data());
  }
  for (; bytes.size() >= kStripe; bytes = bytes.subspan(kStripe)) add_stripe(bytes.data());
  std::copy(bytes.begin(), bytes.end(), rest_.begin());
}

std::uint64_t Checksum::value() const {
  std::uint64_t sum = kPrime5;
  if (length_ >= kStripe) {
    sum = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
          std::rotl(lanes_[3], 18);
    for (const std::uint64_t lane : lanes_) {
      sum = (sum ^ round_of(0, lane)) * kPrime1 + kPrime4;
    }
  }
  sum += length_;
  const std::byte* at = rest_.data();
  const std::byte* const end = at + length_ % kStripe;
  for (; end - at >= 8; at += 8) {
    sum = std::rotl(sum ^ round_of(0, word_at<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  for (; end - at >= 4; at += 4) {
    sum = std::rotl(sum ^ (word_at<std::uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
  }
  for (; at < end; ++at) {
    sum = std::rotl(sum ^ (std::to_integer<std::uint64_t>(*at) * kPrime5), 11) * kPrime1;
  }
  sum = (sum ^ (sum >> 33U)) * kPrime2;
  sum = (sum ^ (sum >> 29U)) * kPrime3;
  return sum ^ (sum >> 32U);
}

}  // namespace mlxtape
