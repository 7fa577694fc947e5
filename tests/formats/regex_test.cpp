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

// What a text is cut into, with | between.
std::string matches_of(const std::string& pattern, const std::string& text,
                       Regex::Flavor flavor = Regex::Flavor::kOniguruma) {
  std::vector<Regex::Match> matches;
  Regex(pattern, flavor).find_all(text, matches);
  std::string out;
  for (const auto& [begin, end] : matches) {
    if (!out.empty()) out += '|';
    out += text.substr(begin, end - begin);
  }
  return out;
}

TEST(Regex, SaysWhatOnigurumaSays) {
  using F = Regex::Flavor;
  struct Row {
    const char *pattern, *text, *matches, *to_rust;
  };
  const Row table[] = {
      // White space is Unicode's property: U+180E is none.
      {R"(\s+|\S+)", "a\u180eb \u3000c", "a\u180eb| \u3000|c", nullptr},
      {R"([^\s\S]|a)", "a b", "a", nullptr},
      // An interval is no possessive one, and may be asked for again.
      {R"(\d{1,2}+)", "12345 6", "12345|6", "12|34|5|6"},
      {R"((?:ab){2}+c)", "ababababc", "ababababc", "ababc"},
      {R"([ab]{1}+)", "abab c", "abab", "a|b|a|b"},
      {R"(\p{L}{2,}+.)", "abc ab", "abc ", nullptr},
      {R"(xa{2}?)", "xaa xa", "xaa|x", "xaa"},
      {R"(a{1,2}?)", "aa", "a|a", "a|a"},
      // Every line has an end to it.
      {R"(a$)", "a\na", "a|a", "a"},
      {R"(a$)", "a\n", "a", ""},
      {R"(^a)", "a\na", "a|a", "a"},
      // A script is its own characters: U+3001 is used with several.
      {R"(\p{Han}+)", "漢、字", "漢|字", nullptr},
      {R"([\p{Hiragana}\p{Katakana}]+)", "あーア、", "あ|ア", nullptr},
      {R"(\P{Han}+)", "a漢", "a", nullptr},
      // What is in both sets, and what is in the first alone.
      {R"([\p{L}&&[^\p{Han}]]+)", "ab漢c", "ab|c", nullptr},
      {R"([\p{L}&&[a-c]]{2}|d)", "abxcd", "ab|d", nullptr},
      {R"([[:alpha:]]+)", "ab1", "ab", nullptr},
      // Words: letters, marks, digits and what connects them; some numbers to one, joiners to the other.
      {R"(\w+)", "a²①ⓐ_‿e\u0301\u200cx!", "a²|ⓐ_‿e\u0301|x", "a|ⓐ_‿e\u0301\u200cx"},
      {R"([^\w\s]+)", "a!? b", "!?", nullptr},
      {R"(\W)", "a! ", "!| ", nullptr},
      {R"( ?[^(\s|[.,!])]+)", "abc de.f(g|h) x", "abc| de|f|g|h| x", nullptr},
      {R"([[a-c]x]+)", "abxd", "abx", nullptr},
      {R"(a{,2}b)", "aaab", "aab", nullptr},
      {R"([]a]+)", "a]b", "a]", nullptr},
      {R"(\x{61}+)", "aab", "aa", nullptr},
  };
  for (const Row& row : table) {
    const auto got = [&](F flavor) {
      std::string matches;
      const std::string error =
          message_of([&] { matches = matches_of(row.pattern, row.text, flavor); });
      return error == "no error" ? matches : error;
    };
    EXPECT_EQ(got(F::kOniguruma), row.matches) << row.pattern;
    EXPECT_EQ(got(F::kRust), row.to_rust != nullptr ? row.to_rust : row.matches) << row.pattern;
  }
  const std::pair<const char*, const char*> refused[] = {
      {"[a[^b]]", "this set in a set is not supported"},
      {"[a[b[c]]]", "a set in a set in a set is not supported"},
      {"[\\W]", "are not supported"},
      {"\\h", "are not supported"},
      {"[a&&b]", "&& must be followed by a set"},
      {"[^a&&[b]]", "this use of && is not supported"},
      {"[a&&[b&&[c]]]", "this use of && is not supported"},
      {"[a&&[b]c]", "a set must end behind &&[...]"},
      {"[a&&[b]", "a set must end behind &&[...]"},
      {"[[:alpha", "[: must end with :]"},
  };
  for (const auto& [pattern, says] : refused) {
    EXPECT_NE(message_of([&] { Regex{std::string(pattern)}; }).find(says), std::string::npos)
        << pattern << ": " << message_of([&] { Regex{std::string(pattern)}; });
  }
}

}  // namespace
}  // namespace mlxtape::formats
