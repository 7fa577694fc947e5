// UTF-8 as bytes, code points and Python's ideas of white space and case.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/utf8_bytes.h"

namespace mlxtape::formats {

// The code point at `at`, which moves behind it. A byte that begins none counts as U+FFFD; so does
// the longest beginning of a valid one, as a whole.
char32_t next_code_point(std::string_view text, std::size_t& at);
void append_utf8(std::string& out, char32_t code_point);  // surrogates and beyond U+10FFFF: U+FFFD

bool is_valid_utf8(std::string_view text);
std::string replace_invalid_utf8(std::string_view text);  // each bad sequence becomes U+FFFD
std::size_t count_code_points(std::string_view text);     // of valid text
// Of valid text, behind so many code points from `at` on, and before so many: where the text ends, begins, if it has fewer.
std::size_t forward(std::string_view text, std::size_t at, std::size_t code_points);
std::size_t backward(std::string_view text, std::size_t at, std::size_t code_points);
// Where valid UTF-8 that is only cut short begins at the end; the length where nothing is cut.
std::size_t complete_prefix(std::string_view text);

std::u32string to_code_points(std::string_view text);

bool is_space(char32_t c);        // as Python's str.isspace
bool is_white_space(char32_t c);  // Unicode's property: without four separators that Python counts
std::string_view trim_left(std::string_view text);
std::string_view trim_right(std::string_view text);
char32_t to_lower(char32_t c);
char32_t to_upper(char32_t c);
std::string to_lower(std::string_view text);  // one code point to one
std::string to_upper(std::string_view text);

}  // namespace mlxtape::formats
