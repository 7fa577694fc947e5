#include "mlxtape/base/quote.h"

#include <gtest/gtest.h>

namespace mlxtape {
namespace {

TEST(Quote, ATerminalIsGivenNothingToObey) {
  EXPECT_EQ(escaped("plain, é, 水, 🙂, 'quotes' and \\"), "plain, é, 水, 🙂, 'quotes' and \\");
  EXPECT_EQ(escaped("\x1b[31mred\x07"), "\\x1b[31mred\\x07");
  EXPECT_EQ(escaped(std::string("a\0b\n\r\t\x7f", 7)), "a\\x00b\\n\\r\\t\\x7f");
  EXPECT_EQ(escaped("a\nb\tc\r", "\n\t"), "a\nb\tc\\r");
  EXPECT_EQ(escaped("\xC2\x9B"
                    "31m \xC2\xA0"),
            "\\u009b31m \xC2\xA0");
  EXPECT_EQ(escaped("\u2027\u2028\u202e\u202f\u2065\u2066\u2069\u206a"),
            "\u2027\\u2028\\u202e\u202f\u2065\\u2066\\u2069\u206a");
  EXPECT_EQ(escaped("a\xFF\x80z\xE6\xB0"), "a\\xff\\x80z\\xe6\\xb0");
  EXPECT_EQ(escaped(""), "");
}

TEST(Quote, ALongTextIsCutBetweenCharacters) {
  EXPECT_EQ(shown("short"), "short");
  EXPECT_EQ(shown(std::string(200, 'x')), std::string(200, 'x'));
  EXPECT_EQ(shown(std::string(201, 'x')), std::string(200, 'x') + "... (201 bytes)");
  EXPECT_EQ(shown("abc\x1b", 3), "abc... (4 bytes)");
  EXPECT_EQ(shown("ab\x1b", 3), "ab\\x1b");
  for (const std::size_t most : {1, 2, 3})
    EXPECT_EQ(shown("水水", most + 3), most == 3 ? "水水" : "水... (6 bytes)");
  EXPECT_EQ(shown("🙂", 3), "... (4 bytes)");
  EXPECT_EQ(shown("\x80\x80\x80\x80\x80\x80", 5), "\\x80\\x80... (6 bytes)");
}

}  // namespace
}  // namespace mlxtape
