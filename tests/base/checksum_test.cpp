#include "mlxtape/base/checksum.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

namespace mlxtape {
namespace {

std::uint64_t sum_of(std::string_view text) {
  Checksum sum;
  sum.add(std::as_bytes(std::span(text.data(), text.size())));
  return sum.value();
}

// Of the reference implementation (python-xxhash, xxh64).
TEST(Checksum, IsXxh64) {
  EXPECT_EQ(sum_of(""), 0xEF46DB3751D8E999U);
  EXPECT_EQ(sum_of("a"), 0xD24EC4F1A98C6E5BU);
  EXPECT_EQ(sum_of("abc"), 0x44BC2CF5AD770999U);
  EXPECT_EQ(sum_of("Nobody inspects the spammish repetition"), 0xFBCEA83C8A378BF1U);
  std::string all;
  for (int i = 0; i < 1000; ++i) all += static_cast<char>(i % 251);
  EXPECT_EQ(sum_of(all), 0xF306F04AA88B54D3U);
}

TEST(Checksum, OfPiecesIsThatOfTheWhole) {
  std::string all;
  for (int i = 0; i < 200; ++i) all += static_cast<char>(7 * i);
  for (std::size_t length = 0; length <= all.size(); ++length) {
    const std::string_view text = std::string_view(all).substr(0, length);
    for (const std::size_t piece : {1U, 7U, 31U, 32U, 33U, 100U}) {
      Checksum sum;
      for (std::size_t at = 0; at < length; at += piece) {
        const std::string_view part = text.substr(at, piece);
        sum.add(std::as_bytes(std::span(part.data(), part.size())));
      }
      ASSERT_EQ(sum.value(), sum_of(text)) << length << " in pieces of " << piece;
    }
  }
}

TEST(Checksum, FindsEveryBitThatChanged) {
  std::string text(75, 'x');
  const std::uint64_t before = sum_of(text);
  for (char& c : text) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      const char was = c;
      c = static_cast<char>(static_cast<unsigned char>(c) ^ (1U << bit));
      EXPECT_NE(sum_of(text), before);
      c = was;
    }
  }
}

}  // namespace
}  // namespace mlxtape
