#include "formats/regex.h"

#include "formats/support.h"

namespace mlxtape::formats {
namespace {

// \K in a group that a lookaround calls: PCRE2 refuses it in the lookaround itself.
TEST(Regex, MatchesThatRunBackwardsAreRefused) {
  const auto message = [](const std::string& pattern, const std::string& text) {
    std::vector<Regex::Match> matches;
    return message_of([&] { Regex(pattern).find_all(text, matches); });
  };
  const std::string rule = "a match must begin behind the one before and end behind its beginning";
  // Begins behind its end.
  EXPECT_EQ(
      message("(?:(?=hello(?1))h|(\\K)z)", "say hello"),
      "regex: '(?:(?=hello(?1))h|(\\K)z)' at byte 0 of a text: " + rule + ", got bytes 9 to 5");
  // Begins inside of the match before, and would be found again and again.
  EXPECT_EQ(message("(?:(?<=a(?1))b|a|(?:(?!)(\\K)))", "ab"), "no error");
  EXPECT_EQ(
      message("(?:a|(?<=(?1)a)b|(\\K)z)", "ab"),
      "regex: '(?:a|(?<=(?1)a)b|(\\K)z)' at byte 1 of a text: " + rule + ", got bytes 0 to 2");
  EXPECT_EQ(message("a\\Kb", "ab ab"), "no error");  // as \K is meant
  EXPECT_NE(message("(a|aa)+$", std::string(60, 'a') + "c").find("limit"), std::string::npos);
  EXPECT_LT(message("(" + std::string(10'000, 'a'), "").size(), 400U);
}

}  // namespace
}  // namespace mlxtape::formats
