// Unicode's normal forms. Most characters of most texts stay as they are and have nothing to do with their neighbours:
// only the others, each with the character before, are taken apart and put together.
#include <algorithm>
#include <array>
#include <vector>

#include <utf8proc.h>

#include "formats/tokenizer_normalize.h"
#include "formats/utf8.h"
#include "mlxtape/base/error.h"

namespace mlxtape::formats {
namespace {

using Point = utf8proc_int32_t;

int class_of(Point c) { return utf8proc_get_property(c)->combining_class; }

// Appends what the code point is made of in this form.
void take_apart(const UnicodeForm& form, Point c, std::vector<Point>& out) {
  const int options =
      UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | (form.compatible ? UTF8PROC_COMPAT : 0);
  std::array<Point, 32> parts{};  // the longest decomposition has 18
  const utf8proc_ssize_t n = utf8proc_decompose_char(
      c, parts.data(), parts.size(), static_cast<utf8proc_option_t>(options), nullptr);
  if (n < 0 || n > static_cast<utf8proc_ssize_t>(parts.size()))
    throw Error(Errc::kArgument,
                std::string("tokenizer: a text has no normal form: ") + utf8proc_errmsg(n));
  out.insert(out.end(), parts.begin(), parts.begin() + n);
}

// Marks behind a letter are ordered by class. utf8proc would do it too, in a time that is quadratic in their number.
void order_marks(std::vector<Point>& points) {
  for (auto begin = points.begin(); begin != points.end();) {
    const auto end = std::find_if(begin, points.end(), [](Point c) { return class_of(c) == 0; });
    std::stable_sort(begin, end, [](Point a, Point b) { return class_of(a) < class_of(b); });
    begin = end == points.end() ? end : end + 1;
  }
}

void append_form(const UnicodeForm& form, std::string_view text, std::vector<Point>& points,
                 std::string& out) {
  points.clear();
  for (std::size_t at = 0; at < text.size();)
    take_apart(form, static_cast<Point>(next_code_point(text, at)), points);
  order_marks(points);
  auto n = static_cast<utf8proc_ssize_t>(points.size());
  if (form.compose)
    n = utf8proc_normalize_utf32(
        points.data(), n, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  for (utf8proc_ssize_t i = 0; i < n; ++i)
    append_utf8(out, static_cast<char32_t>(points[static_cast<std::size_t>(i)]));
}

// Which characters are left alone: those that are their own form and join none before them.
class Alone {
 public:
  explicit Alone(const UnicodeForm& form) : alone_(kEnd, true) {
    std::vector<Point> points;
    std::string same, back;
    for (Point c = 0x80; c < kEnd; ++c) {
      if (c >= 0xD800 && c <= 0xDFFF) continue;
      points.clear();
      take_apart({false, false}, c, points);
      if (form.compose && points.size() == 2) drop(points[1]);
      if (class_of(c) != 0) drop(c);
      points.clear();
      take_apart(form, c, points);
      if (points.size() == 1 && points[0] == c) continue;
      same.clear(), back.clear();
      append_utf8(same, static_cast<char32_t>(c));
      append_form(form, same, points, back);
      if (same != back) drop(c);
    }
    // A syllable of Hangul takes up the vowels and ends that follow it.
    for (Point c = 0x1160; form.compose && c < 0x1200; ++c) drop(c);
  }
  bool operator()(char32_t c) const { return c < kEnd && alone_[c]; }

 private:
  static constexpr Point kEnd = 0x20000;
  void drop(Point c) {
    if (c < kEnd) alone_[static_cast<std::size_t>(c)] = false;
  }
  std::vector<bool> alone_;
};

const Alone& alone_in(const UnicodeForm& form) {
  if (form.compose) {
    static const Alone nfc({true, false});
    if (!form.compatible) return nfc;
    static const Alone nfkc({true, true});
    return nfkc;
  }
  static const Alone nfd({false, false});
  if (!form.compatible) return nfd;
  static const Alone nfkd({false, true});
  return nfkd;
}

}  // namespace

std::string unicode_form(const UnicodeForm& form, std::string text) {
  // Nothing below U+0300 is put together with another, nor taken apart by NFC.
  const unsigned char plain = form.compose && !form.compatible ? 0xCC : 0x80;
  const auto is_plain = [&](char c) {
    return static_cast<unsigned char>(c) < plain;
  };
  if (std::all_of(text.begin(), text.end(), is_plain)) return text;
  const Alone& alone = alone_in(form);
  std::string out;
  std::vector<Point> points;
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t here = at;
    if (is_plain(text[at])) {
      ++at;
      continue;
    }
    if (alone(next_code_point(text, at))) continue;
    const std::size_t begin = here > done ? backward(text, here, 1) : here;
    for (std::size_t next = at; next < text.size(); at = next) {
      if (is_plain(text[next]) || alone(next_code_point(text, next))) break;
    }
    if (done == 0) out.reserve(text.size() + text.size() / 8);
    out.append(text, done, begin - done);
    append_form(form, std::string_view(text).substr(begin, at - begin), points, out);
    done = at;
  }
  return done == 0 ? text : out.append(text, done);
}

}  // namespace mlxtape::formats
